"""Reward functions and the killable processes they run in."""
