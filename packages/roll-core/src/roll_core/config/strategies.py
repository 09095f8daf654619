"""Checks roles whose workers run a strategy: the strategy suits the role, the model, the slots and the other roles."""

from __future__ import annotations

import importlib.util
from math import prod
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from roll_core.config.executors import separate_processes_finding
from roll_core.config.explain import Finding
from roll_core.config.schema import sections
from roll_core.config.weight_transports import weight_finding
from roll_core.errors import PluginError, install_command
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import (
    EMBEDDINGS,
    DataArguments,
    EngineRewardConfig,
    InferWorkerConfig,
    ModelArguments,
    RewardConfig,
    RunConfig,
    StrategyConfig,
    TrainWorkerConfig,
    WorkerConfig,
)
from roll_core.spec.devices import is_even, parse_device_mapping, slots_by_node
from roll_core.spec.model import model_keys
from roll_core.spec.providers import (
    InferCapabilities,
    InferProvider,
    OptimizerProvider,
    TrainCapabilities,
    TrainProvider,
    exports_state,
    replays_experts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from roll_core.config.parts import Parts
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_core.types import MediaKind


class StrategyCheck:
    """Checks one role, and sets the keys in its raw values that the strategy determines."""

    provider: TrainProvider | InferProvider
    strategy: StrategyConfig
    """The validated `strategy_config`."""

    def __init__(
        self, parts: Parts, policy_role: str, path: KeyPath, worker: type[WorkerConfig], role: dict[Any, Any]
    ) -> None:
        self.parts = parts
        self.data = parts.data
        self.policy_role = policy_role
        self.path = path
        self.worker = worker
        self.role = role
        self.at_name: KeyPath = (*path, "strategy_args", "strategy_name")
        self.at_config: KeyPath = (*path, "strategy_args", "strategy_config")
        self.keeps_weights = issubclass(worker, EngineRewardConfig) or (
            issubclass(worker, InferWorkerConfig) and not worker.receives_weights
        )
        policy = None if self.keeps_weights else self.data.get(policy_role)
        self.policy: dict[Any, Any] = policy if isinstance(policy, dict) else {}
        self.report = parts.report

    def run(self) -> None:
        """Look up the strategy and validate its `strategy_config`; then check the role."""
        arguments = self.role.get("strategy_args")
        if not isinstance(arguments, dict) or not isinstance(arguments.get("strategy_name"), str):
            return
        name = arguments["strategy_name"]
        generates = self.worker.kind == "generate"
        kind: type[TrainProvider | InferProvider] = InferProvider if generates else TrainProvider
        provider = self.parts.find(kind, name, self.at_name, self.role)
        if provider is None:
            self._explain_other_kind(name)
            self._suppose_one_replica()
            return
        self.provider = provider
        self._check_kind()
        self._check_model_args()
        self._check_optimizer()
        owner = self.parts.registry.owner(provider)
        schema = schema_of(provider, StrategyConfig, owner=owner)
        raw = arguments.get("strategy_config")
        if raw is not None and not isinstance(raw, dict):
            self._suppose_one_replica()
            return
        strategy = self.parts.by_schema(schema, raw or {}, self.at_config, owner)
        broken = self.parts.composed.broken
        if strategy is None or any(path[: len(self.at_config)] == self.at_config for path in broken):
            base = StrategyConfig
            if (schema.ranks_per_replica, schema.parallel_sizes) != (base.ranks_per_replica, base.parallel_sizes):
                self._suppose_one_replica()
            return
        self.strategy = strategy
        self._check_slots()
        self._check_replicas()
        if generates or self.path == (self.policy_role,):
            self._check_router_replay()
        if generates:
            self._check_engine()
            self._check_weight_transport()
        else:
            model_args = self.role.get("model_args")
            keys = model_keys(model_args, self.data.get("pretrain"))
            self._try(strategy.check_model, keys)
            self._try(strategy.check_model_args, model_args if isinstance(model_args, dict) else {})
            self._check_architecture(self.path, keys)
            self._check_positions(keys, _length(self.data, "prompt_length"), _length(self.data, "response_length"))

    def _try(self, check: Callable[..., None], *arguments: Any, code: str = "ROLL-C018", kind: str = "") -> None:
        """Record the `ValueError` that a check of the strategy raises."""
        try:
            check(*arguments)
        except ValueError as error:
            self.parts.findings.append(Finding(self.at_config, str(error), kind=kind, code=code))

    # -- the strategy and its role -------------------------------------------------------------------------------------

    def _explain_other_kind(self, name: str) -> None:
        """Improve the message if the name exists, but for roles of the other kind."""
        generates = self.worker.kind == "generate"
        other = self.parts.registry.names(TrainProvider if generates else InferProvider)
        if name in other and self.parts.findings[-1].path == self.at_name:
            last = self.parts.findings.pop()
            does = "trains or scores" if generates else "generates"
            expected = {"generate": "generates", "train": "trains"}.get(self.worker.kind, "only scores")
            self.report(self.at_name, f"{name} {does}, but this role {expected}", last.hint, code="ROLL-C017")

    def _check_kind(self) -> None:
        """Check that the strategy can do what the role needs, on the platform of the config."""
        provider, registry, trains = self.provider, self.parts.registry, self.worker.kind == "train"
        if trains and isinstance(provider, TrainProvider) and provider.forward_only:
            able = [other.name for other in registry.providers(TrainProvider) if not other.forward_only]
            message = f"{provider.name} has no optimizer, but this role is trained"
            self.report(self.at_name, message, f"strategies that train: {', '.join(able)}", code="ROLL-C017")
        platform_name = self.data.get("platform")
        platform = platform_name.rpartition("/")[2] if isinstance(platform_name, str) else ""
        if platform and provider.platforms and platform not in provider.platforms:
            forward_only = getattr(provider, "forward_only", False)
            able = [
                other.name
                for other in registry.providers(type(provider))
                if getattr(other, "forward_only", False) == forward_only
                and (not other.platforms or platform in other.platforms)
            ]
            message = f"{provider.name} runs on {', '.join(provider.platforms)}, but platform is {platform}"
            hint = f"strategies that run on it: {', '.join(able)}" if able else ""
            self.report(self.at_name, message, hint, code="ROLL-C017")
        can = provider.capabilities
        offloads = can.sleeps if isinstance(can, InferCapabilities) else can.offload
        if self.role.get("is_offload_states") is True and (self.keeps_weights or not offloads):
            what = f"{'.'.join(self.path)} keeps its weights and" if self.keeps_weights else provider.name
            message = f"{what} cannot offload"
            path = (*self.path, "is_offload_states")
            self.report(path, message, "remove the key, or write false", code="ROLL-C017")
        if isinstance(can, InferCapabilities) and not can.seeds:
            self._check_no_seeds(provider.name)
        if self.data.get("portable_checkpoints") is True and trains and not exports_state(provider):
            message = f"{provider.name} does not export its training state, which portable_checkpoints needs"
            self.report(self.at_name, message, "remove portable_checkpoints", code="ROLL-C017")

    def _check_no_seeds(self, name: str) -> None:
        """Report keys that seed requests of an engine without seeds."""
        for path, part in ((self.path, self.role), (("validation",), self.data.get("validation"))):
            arguments = part.get("generating_args") if isinstance(part, dict) else None
            if isinstance(arguments, dict) and arguments.get("seed") is not None:
                message = f"{name} does not support seeds"
                self.report((*path, "generating_args", "seed"), message, "remove the key", code="ROLL-C017")
        if self.data.get("seeded_rollouts") is True:
            self.report(("seeded_rollouts",), f"{name} does not support seeds", "remove the key", code="ROLL-C017")

    def _check_model_args(self) -> None:
        """Check the model's keys against the strategy's capabilities. Set `disable_gradient_checkpointing` if the
        strategy cannot checkpoint gradients."""
        provider, can, trains = self.provider, self.provider.capabilities, self.worker.kind == "train"
        raw = self.role.get("model_args")
        if raw is not None and not isinstance(raw, dict):
            return
        model, at_model = raw or {}, (*self.path, "model_args")
        if not can.lora and _trains_adapters(model):
            message = f"{provider.name} cannot {'train' if trains else 'load'} adapters"
            hint = f"strategies that can: {', '.join(self._able(lambda other: other.lora))}"
            self.report((*at_model, "lora_target"), message, hint, code="ROLL-C017")
        elif model.get("load_in_4bit") is True and _trains_adapters(model) and trains:
            self._check_4bit((*at_model, "load_in_4bit"))
        dtype = model.get("dtype", ModelArguments.model_fields["dtype"].default)
        if isinstance(dtype, str) and dtype in ("fp32", "bf16", "fp16") and dtype not in can.dtypes:
            dtype_found = dtype if "dtype" in model else f"the default {dtype}"
            message = f"found {dtype_found}, but {provider.name} computes in {', '.join(can.dtypes)}"
            able = self._able(lambda other: dtype in other.dtypes)
            hint = f"strategies for {dtype}: {', '.join(able)}" if able else ""
            self.report((*at_model, "dtype"), message, hint, code="ROLL-C017")
        key = "disable_gradient_checkpointing"
        if isinstance(can, InferCapabilities) or can.gradient_checkpointing or not trains:
            return
        if model.get(key) is False:
            message = f"found false, but {provider.name} cannot checkpoint gradients"
            self.report((*at_model, key), message, "remove the key, or write true", code="ROLL-C017")
        elif key not in model:
            self.role["model_args"] = model | {key: True}

    def _able(self, is_able: Callable[[Any], bool]) -> list[str]:
        """Names of the strategies of this kind with a capability; of a role that trains, those that train."""
        trains = self.worker.kind == "train"
        return [
            other.name
            for other in self.parts.registry.providers(type(self.provider))
            if is_able(other.capabilities) and not (trains and getattr(other, "forward_only", False))
        ]

    def _check_4bit(self, key_path: KeyPath) -> None:
        """Check that the strategy can quantize the frozen layers, and that bitsandbytes is installed."""
        if not getattr(self.provider.capabilities, "load_in_4bit", False):
            known = self.parts.registry.providers(TrainProvider)
            able = [other.name for other in known if other.capabilities.load_in_4bit and not other.forward_only]
            message = f"{self.provider.name} cannot train adapters of a base model in 4 bits"
            self.report(key_path, message, f"remove the key, or use {' or '.join(able)}", code="ROLL-C017")
        elif self.parts.runs_here(self.role) and importlib.util.find_spec("bitsandbytes") is None:
            hint = f"install it: {install_command('roll-modeling[qlora]')}"
            self.report(key_path, "needs bitsandbytes, which is not installed", hint, code="ROLL-C017")

    def _check_optimizer(self) -> None:
        """Check that the strategy runs the optimizer, and validate its options."""
        training_args, can = self.role.get("training_args"), self.provider.capabilities
        if not isinstance(training_args, dict) or not isinstance(can, TrainCapabilities):
            return
        name, path = training_args.get("optimizer", "adamw"), (*self.path, "training_args")
        if not isinstance(name, str):
            return
        optimizer = self.parts.find(OptimizerProvider, name, (*path, "optimizer"), self.role)
        if optimizer is None:
            return
        self.parts.options(
            optimizer, (*path, "optimizer_kwargs"), training_args.get("optimizer_kwargs"), (*path, "optimizer")
        )
        if self.worker.kind != "train" or name == "adamw":
            return
        if not _runs(can, optimizer):
            known = self.parts.registry.providers(TrainProvider)
            able = [other.name for other in known if not other.forward_only and _runs(other.capabilities, optimizer)]
            only = "AdamW" if can.optimizers == "adamw" else "optimizers of sharded matrices"
            message = f"found {name}, but {self.provider.name} runs only {only}"
            self.report((*path, "optimizer"), message, f"strategies that run it: {', '.join(able)}", code="ROLL-C017")
        elif self.data.get("portable_checkpoints") is True:
            message = f"found {name}, but portable_checkpoints have the moments of AdamW"
            self.report((*path, "optimizer"), message, "remove portable_checkpoints", code="ROLL-C017")

    # -- slots, ranks and replicas -------------------------------------------------------------------------------------

    def _set_computed(self, key: str, computed: Any) -> bool:
        """Record a mistake if the config contradicts a key that the strategy's config determines. True if it is not
        given."""
        value = self.role.get(key)
        if value is None or value == computed or (isinstance(value, int) and value < 1) or isinstance(value, bool):
            return value is None
        if isinstance(value, type(computed)):
            message = f"found {value}, but {self.provider.name}'s strategy_config makes it {computed}"
            self.report((*self.path, key), message, f"remove the key, or write {computed}", code="ROLL-C016")
        return False

    def _check_slots(self) -> None:
        """Set `num_gpus_per_worker` to the value that the strategy determines, and check the nodes of each worker's
        slots."""
        provider, num_slots = self.provider, self.role.get("num_gpus_per_worker")
        computed = self.strategy.slots_per_worker()
        self._check_nodes(computed or num_slots)
        spreads = isinstance(provider, InferProvider) and provider.capabilities.tensor_parallel
        if computed is None:
            if not spreads and type(num_slots) is int and num_slots > 1:
                message = f"found {num_slots}, but a worker of {provider.name} has 1 slot"
                hint = "for more workers, give device_mapping more slots"
                self.report((*self.path, "num_gpus_per_worker"), message, hint, code="ROLL-C019")
            return
        if computed > 1 and not spreads:
            message = f"needs {computed} slots per worker, but {provider.name} does not declare tensor_parallel"
            self.report(self.at_config, message, code="ROLL-C019")
        if self._set_computed("num_gpus_per_worker", computed) and self.role.get("device_mapping") is not None:
            self.role["num_gpus_per_worker"] = computed

    def _check_nodes(self, per_worker: object) -> None:
        """Check that the slots of each worker are on one node, or evenly on several if the strategy has followers.

        Without `num_gpus_per_node` the nodes are not known here.
        """
        per_node = self.data.get("num_gpus_per_node")
        if type(per_node) is not int or per_node < 1 or type(per_worker) is not int or per_worker < 2:
            return
        slots = _slots(self.role) or ()
        for rank, start in enumerate(range(0, len(slots), per_worker)):
            mine = slots[start : start + per_worker]
            parts = slots_by_node(mine, per_node)
            if len(parts) == 1:
                continue
            nodes = ", ".join(str(part[0] // per_node) for part in parts)
            message = f"worker {rank} has slots {', '.join(map(str, mine))} on nodes {nodes}"
            expected, why = "one node", ""
            if isinstance(self.provider, InferProvider) and self.provider.follower:
                why = self.strategy.several_nodes_problem()
                expected = "one node" if why else "as many on each node, node by node"
                if not why and is_even(parts, per_node):
                    continue
            message += f", expected {expected} (num_gpus_per_node {per_node})" + (f": {why}" if why else "")
            hint = "change device_mapping, or spread the model over fewer slots"
            self.report((*self.path, "device_mapping"), message, hint, code="ROLL-C019")
            return

    def _check_replicas(self) -> None:
        """Set `ranks_per_replica` to the value that the strategy determines. Check that it divides the role's number of
        ranks, and that the strategy declares the parallelism that explains it. Otherwise ranks would train separate
        models that diverge."""
        provider, strategy, replica = self.provider, self.strategy, self.strategy.ranks_per_replica()
        if self._set_computed("ranks_per_replica", replica) and replica > 1:
            self.role["ranks_per_replica"] = replica
        ranks = _num_ranks(self.role)
        if isinstance(provider, TrainProvider):
            can, sizes = provider.capabilities, strategy.parallel_sizes()
            undeclared = [kind for kind, size in sizes.items() if size > 1 and not getattr(can, kind)]
            for kind in undeclared:
                message = f"found {kind} {sizes[kind]}, which {provider.name} does not declare"
                self.report(self.at_config, message, code="ROLL-C019")
            declared = prod(size for kind, size in sizes.items() if kind != "expert_parallel" and getattr(can, kind))
            if replica > declared and not undeclared:
                message = f"found {replica} ranks per replica, but {provider.name} declares parallelism for {declared}"
                self.report(self.at_config, message, code="ROLL-C019")
            if ranks is not None and ranks > replica and not can.data_parallel:
                key = "world_size" if self.role.get("device_mapping") is None else "device_mapping"
                message = f"found {ranks} ranks, expected {replica}: {provider.name} has no data parallelism"
                hint = "choose a strategy that declares data_parallel"
                self.report((*self.path, key), message, hint, code="ROLL-C019")
        if replica > 1 and ranks is not None and ranks % replica:
            message = f"{ranks} ranks are not a multiple of {strategy.replica_arithmetic()} = {replica}"
            hint = "the number of ranks is that product times data parallel"
            self.report(self.at_config, message, hint, code="ROLL-C019")

    def _suppose_one_replica(self) -> None:
        """If the number of ranks per replica is unknown, assume that all ranks share one. A batch size that does not
        divide then is wrong for any number of replicas, so no false mistake is reported."""
        ranks = _num_ranks(self.role)
        if ranks is not None and self.role.get("ranks_per_replica") is None:
            self.role["ranks_per_replica"] = ranks

    # -- models and engines --------------------------------------------------------------------------------------------

    def _check_engine(self) -> None:
        """Check that the engine can receive weights as its `strategy_config` says: format, adapters and model.

        Of an engine that keeps its weights, check only the architecture and the lengths.
        """
        name, strategy = self.provider.name, self.strategy
        # A role that keeps its weights may have the model of another role: unknown here unless it names its own.
        pretrain = None if self.keeps_weights else self.data.get("pretrain")
        weight_format = strategy.weight_format()
        if self._set_computed("weight_format", weight_format) and weight_format != "dtype":
            self.role["weight_format"] = weight_format
        if strategy.serves_adapters() and (why := self._no_adapters()):
            message = f"makes {name} load adapters separately, but {why}"
            hint = "remove the key: the engine then receives merged weights"
            if not self.policy or not _trains_adapters(self.policy.get("model_args") or {}):
                hint = "set lora_target in the model_args of the trained role, or remove the key"
            self.report(self.at_config, message, hint, code="ROLL-C014")
        source = (self.policy_role,) if self.policy else self.path
        keys = model_keys((self.policy or self.role).get("model_args"), pretrain)
        if not self.keeps_weights:
            self._try(strategy.check_model, keys)
        self._check_architecture(source, keys)
        if issubclass(self.worker, EngineRewardConfig):  # the lengths of its prompts are unknown
            return
        longest = []
        for generating in (self.role, self.data.get("validation")):
            if isinstance(generating, dict):
                generating_args = generating.get("generating_args")
                tokens = generating_args.get("max_new_tokens") if isinstance(generating_args, dict) else None
                longest.append(tokens if type(tokens) is int else _length(self.data, "response_length"))
        # As a `value_error`, it is located at the first key that its message names.
        lengths = _length(self.data, "prompt_length"), max(longest)
        if issubclass(self.worker, InferWorkerConfig) and self.worker.scores_sequences:
            lengths = sum(lengths), 1
        self._check_positions(keys, *lengths)
        self._try(strategy.check_lengths, *lengths, code="ROLL-C014", kind="value_error")

    def _no_adapters(self) -> str:
        """Reason why no role sends adapters to the engine; empty if one may. Without a policy, any role is possible."""
        senders = [self.policy] if self.policy_role else [role for role in self.data.values() if isinstance(role, dict)]
        models = [role["model_args"] for role in senders if isinstance(role.get("model_args"), dict)]
        trainer = self._policy_strategy()
        if self.keeps_weights:
            return "its weights are not trained"
        if not any(map(_trains_adapters, models)):
            return "the role that sends its weights trains no adapters"
        for key, reason in ModelArguments.merged_only().items() if self.policy else ():
            if models[0].get(key):
                return f"{self.policy_role}.model_args.{key} {reason}"
        targets = models[0].get("lora_target")
        names = targets.split(",") if isinstance(targets, str) else targets if isinstance(targets, list) else ()
        ends = {str(name).strip().rpartition(".")[2] for name in names}
        if self.policy and (embeddings := ends & EMBEDDINGS):
            return f"{self.policy_role}.model_args.lora_target adapts the embedding {min(embeddings)}"
        if trainer is not None and not trainer.capabilities.adapter_export:
            return f"{trainer.name} of {self.policy_role} exports merged weights only"
        return ""

    def _policy_strategy(self) -> TrainProvider | None:
        """Strategy of the policy; None if there is no policy, or if its own key has a mistake."""
        arguments = self.policy.get("strategy_args")
        name = arguments.get("strategy_name") if isinstance(arguments, dict) else None
        try:
            return self.parts.registry.find(TrainProvider, name) if isinstance(name, str) else None
        except PluginError:
            return None

    def _check_weight_transport(self) -> None:
        """Check that a weight transport connects the policy's strategy to this engine."""
        trainer = self._policy_strategy()
        if trainer is None or not isinstance(self.provider, InferProvider):
            return
        for check in (weight_finding, separate_processes_finding):
            finding = check(self.parts.registry, trainer, self.provider, self.data, self.at_name)
            if finding is not None:
                self.parts.findings.append(finding)
                return

    def _check_architecture(self, source: KeyPath, keys: Mapping[str, Any]) -> None:
        """Check that the strategy supports the model's architecture. The role at `source` names the model.

        If the role's workers run in another environment, its packages are unknown, and a mistake is only a warning.
        """
        if not self.parts.check_needs:
            return
        here = self.parts.runs_here(self.role)
        if not here:
            self.parts.unchecked.setdefault("its workers run in another environment", []).append(".".join(self.path))
        model_args = (self.policy if source == (self.policy_role,) else self.role).get("model_args")
        model = model_args if isinstance(model_args, dict) else {}
        key_path: KeyPath = ("pretrain",)
        if isinstance(model.get("random_init"), dict) and "model_type" in model["random_init"]:
            key_path = (*source, "model_args", "random_init", "model_type")
        elif "model_name_or_path" in model:
            key_path = (*source, "model_args", "model_name_or_path")
        if not self._supports(self.strategy.check_architecture, keys, key_path):
            return
        if issubclass(self.worker, TrainWorkerConfig) and self.worker.trains_scores:
            self._supports(self.strategy.check_scores, keys, key_path)
        if self.worker.kind == "train" and _trains_adapters(model):
            key_path = (*source, "model_args", "lora_target")
            self._supports(lambda keys: self.strategy.check_adapters(keys, model), keys, key_path)
        if here:
            self._check_keys((*source, "model_args"), model, keys)

    def _supports(
        self,
        check: Callable[[Mapping[str, Any]], str | None],
        keys: Mapping[str, Any],
        key_path: KeyPath,
        code: str = "ROLL-C018",
    ) -> bool:
        """Report what `check` says about the model of `keys` at a key of the config. False after a mistake."""
        role = ".".join(self.path)
        try:
            warning = check(keys)
        except ValueError as error:
            if self.parts.runs_here(self.role):
                self.report(key_path, f"{self.provider.name} of {role}: {error}", code=code)
                return False
            warning = str(error)
        if warning:
            self.parts.model_warnings.setdefault((key_path, warning), []).append(f"{self.provider.name} of {role}")
        return True

    def _check_keys(self, path: KeyPath, model: dict[Any, Any], keys: Mapping[str, Any]) -> None:
        """Report the mistakes in keys of the model's config that `model_args`, at `path`, set."""
        model_type = keys.get("model_type")
        if not isinstance(model_type, str) or "auto_map" in keys:
            return
        stored = model_keys(model | {"model_config_kwargs": None}, self.data.get("pretrain"))
        for section in ("random_init", "model_config_kwargs"):
            raw = model.get(section)
            overrides = {key: raw[key] for key in raw if isinstance(key, str)} if isinstance(raw, dict) else {}
            if section == "model_config_kwargs":
                overrides = {key: value for key, value in overrides.items() if key not in stored}
            overrides.pop("model_type", None)
            for key, reason in self.strategy.key_problems(model_type, overrides).items():
                key_path = (*path, section, key)
                if all(finding.path != key_path for finding in self.parts.findings):
                    self.report(key_path, reason, code="ROLL-C018")

    def _check_positions(self, keys: Mapping[str, Any], prompt: int, response: int) -> None:
        """Check that the model has a position for every token of the longest sequence. Report it for one role."""
        key_path: KeyPath = ("prompt_length",)
        if self.parts.check_needs and all(finding.path != key_path for finding in self.parts.findings):
            check = self.strategy.check_positions
            self._supports(lambda keys: check(keys, prompt, response), keys, key_path, "ROLL-C014")

    def _check_router_replay(self) -> None:
        """Check that engine and trainer of the policy support router replay with this model."""
        raw, provider = self.data.get("router_replay"), self.provider
        if not isinstance(raw, dict) or raw.get("mode") != "R3" or not self.policy:
            return
        at_mode = ("router_replay", "mode")
        if not replays_experts(provider):
            others = [other for other in self.parts.registry.providers(type(provider)) if replays_experts(other)]
            able = [other.name for other in others if not getattr(other, "forward_only", False)]
            does = "replay an engine's experts" if self.path == (self.policy_role,) else "return the experts it chose"
            message = f"{provider.name} of {'.'.join(self.path)} does not {does}"
            hint = f"strategies that do: {', '.join(able)}; or write mode: disable"
            self.report(at_mode, message, hint, code="ROLL-C017")
            return
        try:
            self.strategy.check_router_replay(model_keys(self.policy.get("model_args"), self.data.get("pretrain")))
        except ValueError as error:
            self.report(at_mode, f"R3 {error}", "write mode: disable, or remove router_replay", code="ROLL-C018")


def _slots(role: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """Slots of a role; None if there are none or they are invalid, which the validation of the role reports."""
    try:
        return parse_device_mapping(role.get("device_mapping"))
    except ValueError:
        return None


def _num_ranks(role: Mapping[Any, Any]) -> int | None:
    """Number of ranks of a role that trains or scores, one per slot; None if its values are invalid."""
    size = role.get("world_size")
    if role.get("device_mapping") is None:
        return 1 if size is None else size if type(size) is int else None
    slots = _slots(role)
    return None if slots is None else len(slots)


def _trains_adapters(model_args: dict[Any, Any]) -> bool:
    """True if `model_args` as written enable LoRA."""
    return bool(model_args.get("lora_target")) and bool(model_args.get("lora_rank", True))


def _runs(capabilities: TrainCapabilities, optimizer: OptimizerProvider) -> bool:
    """True if a strategy runs this optimizer, which is not AdamW."""
    return capabilities.optimizers == "any" or (capabilities.optimizers == "sharded" and optimizer.sharded)


def _length(data: Mapping[Any, Any], key: str) -> int:
    """A number of tokens as written; the default if the value is invalid."""
    length, default = data.get(key), RunConfig.model_fields[key].default
    return length if type(length) is int else int(default)


# -- images and videos -------------------------------------------------------------------------------------------------


def named_media(kind: MediaKind, schema: type[RunConfig], data: Mapping[Any, Any]) -> str:
    """Which key names a column of images or videos; empty if none."""
    for path, _, arguments in sections(schema, dict(data), DataArguments):
        if arguments.get(f"{kind}s") is not None:
            return f"{'.'.join(path)}.{kind}s names a column of {kind}s"
    return ""


def unread_media(
    kind: MediaKind, where: str, schema: type[RunConfig], data: Mapping[Any, Any], registry: Registry
) -> Iterator[Finding]:
    """Yield a mistake for each role that cannot read the images or videos that the data have, as `where` says."""
    roles: dict[KeyPath, tuple[str, Any, Any]] = {}
    policy = data.get(schema.policy_role)
    for path, worker, role in sections(schema, dict(data), WorkerConfig):
        receives = issubclass(worker, InferWorkerConfig) and worker.receives_weights
        model = policy if receives and isinstance(policy, dict) else role
        roles[path] = worker.kind, role.get("strategy_args"), model.get("model_args")
    for group_name, group in data.items():
        for domain, reward in group.items() if isinstance(group, dict) else ():
            if isinstance(reward, RewardConfig) and reward.strategy_args is not None:
                model_args = reward.model_args.model_dump()
                roles[group_name, str(domain)] = reward.kind, reward.strategy_args.model_dump(), model_args
    for path, (role_kind, arguments, model_args) in roles.items():
        strategy = arguments if isinstance(arguments, dict) else {}
        name = strategy.get("strategy_name")
        known: Sequence[InferProvider] | Sequence[TrainProvider] = (
            registry.providers(InferProvider) if role_kind == "generate" else registry.providers(TrainProvider)
        )
        provider = next((provider for provider in known if provider.name == name), None)
        if role_kind == "reward" or provider is None:
            continue
        if kind in provider.capabilities.media:
            keys = model_keys(model_args, data.get("pretrain"))
            prompt = _length(data, "prompt_length")
            yield from _unread_as_configured(kind, where, path, provider, strategy, keys, prompt, registry)
            continue
        able = [
            other.name
            for other in known
            if kind in other.capabilities.media and not (role_kind == "train" and getattr(other, "forward_only", False))
        ]
        message = f"{name} does not read {kind}s, but {where}"
        hint = f"strategies that read {kind}s: {', '.join(able) or 'none'}"
        yield Finding((*path, "strategy_args", "strategy_name"), message, hint, code="ROLL-C017")


def _unread_as_configured(
    kind: MediaKind,
    where: str,
    path: KeyPath,
    provider: TrainProvider | InferProvider,
    strategy: Mapping[str, Any],
    keys: Mapping[str, Any],
    prompt: int,
    registry: Registry,
) -> Iterator[Finding]:
    """Yield the mistake of a strategy that does not read images with the model of `keys`, or splits sequences."""
    schema = schema_of(provider, StrategyConfig, owner=registry.owner(provider))
    at_name, at_config = ((*path, "strategy_args", key) for key in ("strategy_name", "strategy_config"))
    try:
        config = schema.model_validate(strategy.get("strategy_config") or {})
        if isinstance(provider, InferProvider):
            config.check_images(keys, kind, prompt)
    except ValidationError:  # the validation of the whole config reports it
        return
    except ValueError as error:
        yield Finding(at_name, f"{provider.name} of {'.'.join(path)}: {error}", code="ROLL-C017")
        return
    size = config.parallel_sizes().get("context_parallel", 1)
    if size > 1:
        message = f"context parallelism (size {size}) does not support {kind}s, but {where}"
        yield Finding(at_config, message, "set its size to 1", code="ROLL-C018")
