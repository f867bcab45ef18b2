"""Messages between trainer and servers (channel) and weights from trainer to servers."""
