"""Values that are each valid but cannot work together; what depends on the machine is checked by the launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pasync.errors import nearest

if TYPE_CHECKING:
    from pasync.config import Config


def conflicts(config: Config) -> list[str]:
    """Every combination that cannot work, each as `key=value: why, what is allowed`."""
    c, found = config, []
    groups, responses = c.algorithm.batch_groups, c.algorithm.group_responses
    if responses < 2:
        found.append(f"algorithm.group_responses={responses}: a group of one has no baseline, must be at least 2")
    if responses > c.rollout.max_num_seqs:
        found.append(f"algorithm.group_responses={responses}: a group must fit a server, rollout.max_num_seqs={c.rollout.max_num_seqs}")
    cut = c.parallel.pipeline * c.parallel.tensor
    if c.parallel.ranks % cut:
        found.append(f"parallel.ranks={c.parallel.ranks}: must be a multiple of parallel.pipeline x parallel.tensor={cut}")
    elif groups % c.replicas:
        found.append(f"algorithm.batch_groups={groups}: must be a multiple of the data-parallel replicas={c.replicas}")
    if c.parallel.data == "fsdp" and c.parallel.accumulate == "exact":
        found.append("parallel.data=fsdp: adds up gradients in float32, parallel.accumulate=exact needs parallel.data=zero1")
    if c.parallel.data == "fsdp" and c.model.offload_reference:
        found.append("parallel.data=fsdp: already holds only a slice of the reference model, set model.offload_reference=false")
    if c.lora.rank and (cut > 1 or c.parallel.data == "fsdp"):
        found.append(f"lora.rank={c.lora.rank}: adapters stand beside whole layers, needs parallel.pipeline=tensor=1 and data=zero1")
    if c.lora.rank and c.model.offload_reference:
        found.append("model.offload_reference=true: with lora.rank the reference is the policy without adapters, set it to false")
    if c.device.nodes > 1 and c.run.max_restarts:
        found.append(f"run.max_restarts={c.run.max_restarts}: of several nodes (device.nodes) none starts again alone, set 0")
    if c.device.nodes > 1 and c.rollout.max_restarts:
        found.append(
            f"rollout.max_restarts={c.rollout.max_restarts}: the trainer cannot have a server of another node ended (device.nodes), set 0"
        )
    if c.algorithm.tri_model == "always" and c.schedule == "one_step_off":
        found.append("algorithm.tri_model=always: the old policy of one_step_off is the servers', set tri_model=needed")
    for key, value in (("device.count", c.device.count), ("run.dir", c.run.dir)):
        if c.device.nodes > 1 and value is None:
            found.append(f"{key}=null: must be given with device.nodes={c.device.nodes}, the same on every node")
    if c.algorithm.max_kl and not c.algorithm.kl_coef:
        found.append(f"algorithm.max_kl={c.algorithm.max_kl}: KL is only known with a reference model, set algorithm.kl_coef above 0")
    if c.eval.every and not c.data.eval:
        found.append(f"eval.every={c.eval.every}: needs data.eval, or set eval.every=0")
    if c.data.eval and not c.eval.every:
        found.append("data.eval: is given but eval.every=0 never uses it, set eval.every or data.eval=null")
    if c.rollout.silence_s <= 2 * c.rollout.heartbeat_s:
        found.append(f"rollout.silence_s={c.rollout.silence_s}: must be more than twice rollout.heartbeat_s={c.rollout.heartbeat_s}")
    longest = max(c.rollout.start_s, c.rollout.deadline_s, c.sync.deadline_s, c.eval.max_delay_s or 0.0)
    if c.parallel.deadline_s <= longest:
        found.append(f"parallel.deadline_s={c.parallel.deadline_s}: must exceed every other deadline, now {longest}")
    for name, held_out in (c.data.eval or {}).items():
        key, k = f"data.eval.{name}.responses", held_out.responses
        if k > c.rollout.max_num_seqs:
            found.append(f"{key}={k}: the responses to a problem must fit a server, rollout.max_num_seqs={c.rollout.max_num_seqs}")
        if k > 1 and not c.eval.temperature:
            found.append(f"{key}={k}: with eval.temperature=0 all of them are the same, set it above 0")
    for key, data in c.data.sets.items():
        if data.source.startswith("reasoning-gym:") and data.size is None:
            found.append(f"{key}.size=null: reasoning-gym generates problems without end, give how many")
        if data.options and not data.source.startswith("reasoning-gym:"):
            found.append(f"{key}.options: only a reasoning-gym source takes options, not {data.source}")
    reward = c.rewards.function
    if reward not in ("math", "exact") and ":" not in reward:
        found.append(f"rewards.function={reward}: must be math, exact or module:function{nearest(reward, ['math', 'exact'])}")
    kind, _, folder = c.rollout.source.partition(":")
    if kind not in ("live", "record", "only", "replay") or (kind == "replay") != bool(folder):
        hint = nearest(kind, ["live", "record", "only", "replay:"])
        found.append(f"rollout.source={c.rollout.source}: must be live, record, only or replay:<run folder>{hint}")
    if c.replayed_run and not (c.replayed_run / "rollouts").is_dir():
        found.append(f"rollout.source={c.rollout.source}: no run was recorded there (rollout.source=record keeps its groups in rollouts/)")
    if c.replayed_run and c.eval.every:
        found.append(f"eval.every={c.eval.every}: a replayed run has no server to evaluate on, set eval.every=0 and data.eval=null")
    for key, unset in (("replay_order", "recorded"), ("replay_delay", "none")):
        if getattr(c.rollout, key) != unset and not c.replayed_run:
            found.append(f"rollout.{key}={getattr(c.rollout, key)}: only rollout.source=replay:<run folder> has an order to choose")
    if c.algorithm.refill_limit and c.algorithm.filter_zero_variance != "refill":
        found.append(f"algorithm.refill_limit={c.algorithm.refill_limit}: needs algorithm.filter_zero_variance=refill")
    if c.run.max_restarts and not c.checkpoint.every:
        found.append(f"run.max_restarts={c.run.max_restarts}: nothing to continue from, needs checkpoint.every of at least 1")
    if not c.trains and (c.checkpoint.every or c.schedule == "one_step_off"):
        found.append("rollout.source=only: trains nothing, so set checkpoint.every=0 and schedule=periodic")
    return found
