"""What one setting requires of another: checks over the whole configuration, in the order of their reports."""

from __future__ import annotations

from collections.abc import Callable

from gkd.config.base import GROUP_OF
from gkd.config.run import Config


def _losses_can_be_made(config: Config) -> None:
    """Make what the loss is made of, as a class of the user's may refuse its settings, or fail."""
    algorithm = config.algorithm
    algorithm.loss.build()
    algorithm.advantage.build()
    algorithm.policy.build((0.2, 0.2))


def _own_models_and_data_go_together(config: Config) -> None:
    present = {"model.path": not config.uses_task}
    model = config.teacher.model
    teacher = any((model.path, model.size, config.teacher.server_ip, config.teacher.models))
    if config.algorithm.needs_teacher:
        present["teacher.model.path (or teacher.server_ip)"] = teacher
    elif teacher:
        raise ValueError(f"a teacher is given, but algorithm.name={config.algorithm.name} uses none")
    present |= {"data.train_files": bool(config.data.train_files), "data.val_files": bool(config.data.val_files)}
    if config.data.task is not None and not config.uses_task:
        raise ValueError(f"data.task={config.data.task} makes the models: name no other, or set data.task=null")
    if any(present.values()) and not all(present.values()):
        have = ", ".join(k for k, v in present.items() if v)
        lack = ", ".join(k for k, v in present.items() if not v)
        raise ValueError(f"given {have} but not {lack}: name all of them, or none for the built-in task")


def _a_reference_is_used(config: Config) -> None:
    if config.reference.model.path is None or config.has_reference_group:
        return
    why = (
        "algorithm.kl.coef=0 uses none"
        if not config.algorithm.needs_reference
        else "with actor.lora.r it is the student"
    )
    raise ValueError(f"reference.model.path is set, but {why}")


def _several_teachers_have_keys(config: Config) -> None:
    teacher = config.teacher
    if bool(teacher.models) != bool(config.data.teacher_key):
        raise ValueError("teacher.models and data.teacher_key go together: which teacher is a prompt for?")
    if teacher.models and (teacher.model.path is not None or teacher.server_ip is not None):
        raise ValueError("teacher.models excludes teacher.model.path and teacher.server_ip")
    if len(teacher.models) > teacher.n_engines:
        raise ValueError(
            f"teacher.models names {len(teacher.models)} models, and the teacher's pool has {teacher.n_engines} "
            "engines: at least one each (teacher.n_gpus_per_node)"
        )


def _a_chat_template_is_for_a_teacher(config: Config) -> None:
    if config.teacher.chat_template is not None and not config.algorithm.needs_teacher:
        raise ValueError(
            f"teacher.chat_template={config.teacher.chat_template} is given, but algorithm.name="
            f"{config.algorithm.name} uses no teacher"
        )


def _external_teacher_has_no_pool(config: Config) -> None:
    if config.teacher.server_ip is not None and config.teacher.ranges() is not None:
        raise ValueError("teacher.gpus and teacher.server_ip exclude each other: an external teacher has no pool")


def _ranges_are_disjoint(config: Config) -> None:
    owner: dict[int, str] = {}
    colocated = config.hosts()
    for name, pool in config.pools():
        for index in pool.gpus or [] if GROUP_OF[name] not in colocated else []:
            if index in owner:
                raise ValueError(f"{owner[index]}.gpus and {name}.gpus overlap: both name GPU {index}")
            owner[index] = name


def _colocated_groups_fit_on_their_hosts(config: Config) -> None:
    pools = {GROUP_OF[section]: (section, pool) for section, pool in config.pools()}
    for group, host in config.hosts().items():
        (section, pool), (other, host_pool) = pools[group], pools[host]
        key = f"{section}.colocate_with={pool.colocate_with}"
        if pool.n_gpus_per_node > host_pool.n_gpus_per_node or pool.nnodes > host_pool.nnodes:
            raise ValueError(
                f"{key}: {section} is to have {pool.n_gpus_per_node} GPUs on {pool.nnodes} nodes, and {other} has "
                f"{host_pool.n_gpus_per_node} on {host_pool.nnodes}"
            )
        if pool.gpus_by_node is not None:
            raise ValueError(f"{key}: {section} is on the first GPUs of {other}, so leave {section}.gpus_by_node out")
        if pool.gpus is not None and not set(pool.gpus) <= set(host_pool.gpus or ()):
            raise ValueError(f"{key}: {section}.gpus={pool.gpus} is not within {other}.gpus={host_pool.gpus}")


def _offload_is_possible(config: Config) -> None:
    if config.cluster.offload is not True:
        return
    if not config.groups_on_actor_gpus():
        raise ValueError("cluster.offload=true: no group shares GPUs with the actor (colocate_with)")
    if config.actor.lora.quantize is not None:
        raise ValueError(f"cluster.offload=true: actor.lora.quantize={config.actor.lora.quantize} stays on its GPU")


def _the_engine_takes_the_weights(config: Config) -> None:
    transfer, engine = config.weights.transfer, config.rollout
    if config.weights.transfer_class.gpu_to_gpu and not engine.engine_class.gpu_transfers:
        raise ValueError(
            f"weights.transfer={transfer}: rollout.engine={engine.engine} takes no weights from GPU to GPU; "
            "weights.transfer=object_store or auto would work"
        )


def _the_shards_can_be_sent(config: Config) -> None:
    weights, lora = config.weights, config.actor.lora
    if not weights.transfer_class.shards:
        return
    if lora.r is not None:
        raise ValueError(
            f"weights.transfer={weights.transfer}: it sends what the actor trains, and the adapter of "
            f"actor.lora.r={lora.r} is merged into the weights only on other ways; auto would do"
        )
    if weights.transfer_class.ray_executor and (size := config.rollout.tensor_parallel_size) > 1:
        raise ValueError(
            f"weights.transfer={weights.transfer}: vLLM's Ray executor runs here on one GPU an engine, not on those of "
            f"rollout.tensor_parallel_size={size}; nccl or auto would do"
        )
    if weights.checksum:
        raise ValueError(
            f"weights.checksum=true: weights.transfer={weights.transfer} has no buckets that could be compared; "
            "weights.checksum=false, or weights.transfer=auto, would do"
        )


def _copies_have_their_gpus(config: Config) -> None:
    size, n_gpus, way = config.actor.fsdp_size, config.trainer.n_workers, config.weights.transfer
    if size is None:
        return
    if n_gpus % size:
        raise ValueError(f"actor.fsdp_size={size}: it does not divide the actor's {n_gpus} GPUs into equal copies")
    if size < n_gpus and config.weights.transfer_class.shards:
        raise ValueError(f"actor.fsdp_size={size}: weights.transfer={way} sends shards over all of the actor's GPUs")


def _the_adapter_can_be_sent_alone(config: Config) -> None:
    if not config.weights.adapter_only:
        return
    lora, rollout = config.actor.lora, config.rollout
    way = config.weights.transfer
    if lora.r is None:
        why = "there is no adapter; actor.lora.r, a rank, would do"
    elif lora.quantize is not None:
        why = f"engines have the weights under it as they are, not in 4 bits as actor.lora.quantize={lora.quantize} has"
    elif not rollout.engine_class.adapter_ranks:
        why = f"rollout.engine={rollout.engine} takes whole weights alone; rollout.engine=vllm would do"
    elif lora.r > rollout.engine_class.adapter_ranks[-1]:
        most = rollout.engine_class.adapter_ranks[-1]
        why = f"rollout.engine={rollout.engine} takes ranks up to {most}, not actor.lora.r={lora.r}"
    elif config.weights.transfer_class.gpu_to_gpu:
        why = f"an adapter goes through the host, not by weights.transfer={way}; object_store or auto would do"
    elif rollout.nodes_an_engine > 1:
        why = "engines over several nodes do not share its file; rollout.across_nodes=false would do"
    else:
        return
    raise ValueError(f"weights.adapter_only=true: {why}")


def _the_engine_samples_at_the_temperature(config: Config) -> None:
    if (bounds := config.rollout.engine_class.temperatures) is None:
        return
    engine, (lowest, highest) = config.rollout.engine, bounds
    for setting, temperature in config.temperatures():
        if not lowest <= temperature <= highest:
            raise ValueError(
                f"{setting}={temperature:g}: rollout.engine={engine} samples at {lowest:g} to {highest:g}, "
                "rollout.engine=hf at any temperature"
            )


def _policy_gradient_is_on_policy(config: Config) -> None:
    loss, rollout = config.algorithm.loss, config.rollout
    if loss.is_policy_gradient and not (rollout.is_plain and loss.temperature == 1.0):
        raise ValueError(
            f"algorithm.loss.name={loss.name} is a policy gradient on the plain model's samples: "
            "rollout.temperature, rollout.top_p and algorithm.loss.temperature must be 1, without rollout.top_k, "
            "rollout.min_p and rollout.presence_penalty"
        )


def _dropout_leaves_the_ratio(config: Config) -> None:
    """Ask for the same network in the passes that a ratio compares: dropout makes another one of each."""
    dropout, algorithm = config.actor.lora.dropout if config.actor.lora.r is not None else 0.0, config.algorithm
    if dropout and algorithm.weighs_samples and (updates := config.several_updates) is not None:
        by = f"name={algorithm.name}" if algorithm.needs_policy else f"loss.name={algorithm.loss.name}"
        raise ValueError(
            f"actor.lora.dropout={dropout:g}: {updates}, and algorithm.{by} compares the student of each with that "
            "before, which dropout makes another one; actor.lora.dropout=0 would do"
        )


def _scorers_know_no_penalty(config: Config) -> None:
    penalty, algorithm = config.rollout.presence_penalty, config.algorithm
    if config.has_reference_group:
        scorer = "the reference"
    elif algorithm.advantage.teacher_kl > 0:
        scorer = f"the teacher of algorithm.advantage.teacher_kl={algorithm.advantage.teacher_kl:g}"
    else:
        return
    if penalty:
        raise ValueError(
            f"rollout.presence_penalty={penalty:g}: {scorer} scores without it, so that the student would learn to "
            "repeat itself; rollout.presence_penalty=0 would do"
        )


def _rewards_can_be_learned_from(config: Config) -> None:
    if not config.algorithm.policy_weight:
        if config.reward.functions:
            raise ValueError(
                f"reward.functions={config.reward.functions}: nothing is learned from rewards with "
                f"algorithm.name={config.algorithm.name} and algorithm.reward_weight=0"
            )
        return
    why = f"algorithm.name={config.algorithm.name} learns from the differences between rewards"
    if config.rollout.n < 2:
        raise ValueError(f"rollout.n={config.rollout.n}: {why} of one prompt's samples; at least 2")
    if not config.reward.functions and not config.uses_task:
        raise ValueError(f"reward.functions is empty: {why}")
    if (weights := config.reward.weights) and not any(weights) and not _learns_beside_rewards(config):
        raise ValueError(f"reward.weights={weights}: {why}, and with weights of 0 all are equal")
    if config.has_reward_model_group and config.reward_model.model.path is None:
        raise ValueError("reward.functions names reward_model, and reward_model.model.path is not set")


def _learns_beside_rewards(config: Config) -> bool:
    """Return whether functions whose weights are 0, so that they are logged alone, leave something to learn from."""
    algorithm = config.algorithm
    penalty = algorithm.overlong.action == "penalty"
    return bool(penalty or algorithm.distils or algorithm.advantage.teacher_kl or algorithm.supervised_weight)


def _own_answers_can_be_learned_from(config: Config) -> None:
    algorithm = config.algorithm
    if algorithm.on_policy_share == 1:
        if algorithm.supervised_weight:
            raise ValueError(
                "algorithm.supervised_weight counts for the data's own answers, of which "
                "algorithm.on_policy_share=1 leaves none"
            )
        return
    why = f"algorithm.on_policy_share={algorithm.on_policy_share:g} learns from the data's own answers"
    if algorithm.policy_weight or algorithm.loss.is_policy_gradient:
        raise ValueError(f"{why}, which no policy gradient can: the student did not sample them")


def _supervised_training_samples_nothing(config: Config) -> None:
    if not config.algorithm.is_supervised:
        return
    names = ("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "horizon.start")
    for name in (*(f"rollout.{setting}" for setting in names), "schedule.max_staleness"):
        value, only = config.read_setting(name)
        if value != only:
            only_value = "null" if only is None else f"{only:g}"
            raise ValueError(
                f"{name}={value:g} is about samples: algorithm.name={config.algorithm.name} learns from one answer of "
                f"the data a prompt; {name}={only_value} would do"
            )


def _the_teachers_advantage_is_at_one_temperature(config: Config) -> None:
    algorithm, sampled = config.algorithm, config.rollout.temperature
    if algorithm.distils and algorithm.advantage.teacher_kl and algorithm.loss.temperature != sampled:
        raise ValueError(
            f"algorithm.advantage.teacher_kl={algorithm.advantage.teacher_kl:g} compares what was sampled at "
            f"rollout.temperature={sampled:g} with the teacher at algorithm.loss.temperature="
            f"{algorithm.loss.temperature:g}: both must be the same"
        )


def _questions_are_named(config: Config) -> None:
    if config.model.path is not None or config.model.size is not None:
        raise ValueError("model.path names what is trained: a model to evaluate is models.NAME")
    if twice := sorted(config.models.keys() & config.evaluate.endpoints.keys()):
        raise ValueError(f"models.{twice[0]} and evaluate.endpoints.{twice[0]} have one name")
    if not config.evaluate.sets:
        raise ValueError(
            "there is nothing to measure: name a set of questions (+sets=NAME or evaluate.sets.NAME.files)"
        )


def require_schedule(config: Config) -> None:
    """Raise ValueError where what ``schedule`` has done at the same time cannot be."""
    schedule = config.schedule
    if schedule.streaming is True and (why := config.streaming_obstacle) is not None:
        raise ValueError(f"schedule.streaming=true: {why}; schedule.streaming=auto would do without")
    if schedule.max_staleness and config.cluster.offload is True:
        raise ValueError(
            f"schedule.max_staleness={schedule.max_staleness}: the actor is offloaded while engines on its GPUs "
            "sample, so they cannot work at the same time (cluster.offload); schedule.max_staleness=0, or GPUs of "
            f"their own ({config.own_gpus()})"
        )
    if schedule.in_flight and not schedule.max_staleness:
        raise ValueError(
            "schedule.in_flight=true: with schedule.max_staleness=0 nothing is sampled while weights change; "
            "schedule.max_staleness=1 or more would do"
        )
    if schedule.in_flight and not config.rollout.engine_class.in_flight:
        raise ValueError(
            f"schedule.in_flight=true: rollout.engine={config.rollout.engine} takes weights between batches alone; "
            "rollout.engine=vllm or schedule.in_flight=false would do"
        )


def _early_cuts_are_learned_from(config: Config) -> None:
    action = config.algorithm.overlong.action
    if config.rollout.horizon.start is not None and action != "keep":
        raise ValueError(
            f"algorithm.overlong.action={action} is against responses that are cut, and rollout.horizon cuts them"
        )


def _the_penalty_leaves_room(config: Config) -> None:
    """Ask for lengths without a penalty: otherwise every token costs, also in groups of equal rewards."""
    overlong, longest = config.algorithm.overlong, config.rollout.max_response_length
    if overlong.action == "penalty" and overlong.buffer > longest:
        raise ValueError(
            f"algorithm.overlong.buffer={overlong.buffer}: the penalty is for the last tokens of "
            f"rollout.max_response_length={longest}; a fifth of these is DAPO's"
        )


def _bands_are_of_rewards(config: Config) -> None:
    rewards = config.reward.labels().values() if config.algorithm.policy_weight else ()
    for name in config.watch.reward_kl:
        if name not in rewards:
            raise ValueError(
                f"watch.reward_kl.{name}: the run has no such reward; it has {', '.join(rewards) or 'none'}"
            )
        if not config.has_reference_group:
            raise ValueError(
                f"watch.reward_kl.{name}: no reference scores samples, which takes algorithm.kl.coef above 0 and a "
                "reference of its own (no actor.lora.r)"
            )


_CHECKS: tuple[Callable[[Config], None], ...] = (
    _own_models_and_data_go_together,
    _a_reference_is_used,
    _several_teachers_have_keys,
    _a_chat_template_is_for_a_teacher,
    _external_teacher_has_no_pool,
    _ranges_are_disjoint,
    _colocated_groups_fit_on_their_hosts,
    _offload_is_possible,
    _the_engine_takes_the_weights,
    _the_shards_can_be_sent,
    _copies_have_their_gpus,
    _the_adapter_can_be_sent_alone,
    _the_engine_samples_at_the_temperature,
    _policy_gradient_is_on_policy,
    _dropout_leaves_the_ratio,
    _scorers_know_no_penalty,
    _rewards_can_be_learned_from,
    _own_answers_can_be_learned_from,
    _supervised_training_samples_nothing,
    _the_teachers_advantage_is_at_one_temperature,
    require_schedule,
    _early_cuts_are_learned_from,
    _the_penalty_leaves_room,
    _bands_are_of_rewards,
    _losses_can_be_made,
)
"""Each raises ValueError, which names the settings that do not go together."""

_CHECKS_OF_EVALUATIONS: tuple[Callable[[Config], None], ...] = (
    _questions_are_named,
    _ranges_are_disjoint,
    _the_engine_samples_at_the_temperature,
)
"""Those of configurations that name models to evaluate, in place of :data:`_CHECKS`."""


def require_together(config: Config) -> None:
    """Raise ValueError for the first settings that do not go together."""
    for check in _CHECKS_OF_EVALUATIONS if config.evaluates else _CHECKS:
        check(config)
