"""Validates a composed config against the schemas of plugins, and collects every mistake.

Invalid parts are set aside and the rest is validated again, so that one mistake does not hide others: a misspelt key
and an impossible batch size are reported together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel

from roll_core.config.explain import Finding, code_of, show
from roll_core.config.foreign_keys import foreign_hint
from roll_core.config.mistakes import take_out, validate_all
from roll_core.config.model_keys import model_keys
from roll_core.config.nearest import MAX_SUGGESTIONS, suggest_key
from roll_core.config.schema import paths, roles, schema_at
from roll_core.config.weight_transports import weight_finding
from roll_core.config.written import COMMAND_LINE, KeyLocation
from roll_core.errors import ConfigError, ConfigProblem, MissingRequirementError, PluginError, UnknownProviderError
from roll_core.plugins.requirements import check_requirements
from roll_core.plugins.signatures import signature_problem
from roll_core.plugins.targets import schema_of
from roll_core.spec.config import Config, RewardConfig, RunConfig, StrategyConfig
from roll_core.spec.devices import parse_device_mapping
from roll_core.spec.providers import (
    AdvantageProvider,
    InferCapabilities,
    InferProvider,
    PipelineProvider,
    PlatformProvider,
    PolicyLossProvider,
    Provider,
    RewardProvider,
    TrackerProvider,
    TrainProvider,
    WeightTransportProvider,
    exports_state,
    replays_experts,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from roll_core.config.compose import Composed
    from roll_core.config.source import KeyPath
    from roll_core.plugins.registry import Registry
    from roll_core.spec.config import WorkerConfig

MAX_LAYER = 1_000_000
M = TypeVar("M", bound=BaseModel)
P = TypeVar("P", bound=Provider)

NAMED_PARTS: dict[str, type[Provider]] = {
    "platform": PlatformProvider,
    "adv_estimator": AdvantageProvider,
    "pg_variant": PolicyLossProvider,
    "weight_transport": WeightTransportProvider,
}
"""Top-level keys whose value names a part, with the kind of part. Used if the pipeline's schema has the key."""

OPTIONS: dict[type[Provider], str] = {AdvantageProvider: "adv_options", PolicyLossProvider: "pg_options"}
"""Top-level keys with the options of a part that another top-level key names."""

Further = Callable[[type[RunConfig], "Mapping[Any, Any]"], Iterable[Finding]]
"""Finds further mistakes in the values for a pipeline's schema; rewards are already validated, keys may be invalid."""


def validate(
    composed: Composed, registry: Registry, further: Further | None = None, *, needs: bool
) -> tuple[RunConfig, PipelineProvider]:
    """The pipeline's validated config, and its provider. Raises `ConfigError` with all problems, in the order of the
    files."""
    return _Validation(composed, registry, further, needs).run()


@dataclass(slots=True)
class _Validation:
    composed: Composed
    registry: Registry
    further: Further | None
    needs: bool
    """True if requirements must be met in this environment."""
    data: dict[Any, Any] = field(init=False)
    found: list[Finding] = field(default_factory=list)
    cause: BaseException | None = None
    """Exception of a plugin that failed to load, if a requested part is missing because of it."""
    policy_role: str = ""
    """Role of the pipeline's schema that is the policy."""
    suggestions: int = 0
    """Number of suggestions for unknown keys so far."""
    extra_paths: list[KeyPath] = field(default_factory=list)
    """Keys in the schemas of strategies and rewards, for suggestions."""

    def __post_init__(self) -> None:
        self.data = deepcopy(self.composed.data)
        for path in self.composed.broken:
            take_out(self.data, path)

    def run(self) -> tuple[RunConfig, PipelineProvider]:
        provider = None if ("pipeline",) in self.composed.broken else self._pipeline()
        if provider is None:
            raise self._error(RunConfig)
        schema = schema_of(provider, RunConfig, owner=self.registry.owner(provider))
        self._blocks(schema)
        self.policy_role = schema.policy_role
        asked_for = self.data["pipeline"]
        self.data["pipeline"] = provider.name
        for path, worker, role in list(roles(schema, self.data)):
            self._environment(path, role)
            if worker.kind == "reward":
                self._reward(path, role)
            else:
                self._strategy(path, worker, role)
        self._named_parts(schema)
        broken = self.composed.broken
        config, found = validate_all(schema, self.data, self.registry.owner(provider), broken)
        self.found += found
        if self.further is not None:
            self.found += self.further(schema, self.data)
        if self.found or config is None or self.composed.problems:
            raise self._error(schema)
        return _restore_name(config, "pipeline", asked_for), provider

    def _blocks(self, schema: type[RunConfig]) -> None:
        """Remove blocks of fragments that are not keys of the config. A block that no interpolation refers to is a
        mistake."""
        for name in sorted(self.composed.blocks - schema.model_fields.keys()):
            self.data.pop(name, None)
            if name not in self.composed.referred:
                message = f"is not used: no key of the config, and nothing refers to it as ${{{name}}}"
                hint = f"write strategy_config: ${{{name}}}, or what else it is for"
                self.found.append(Finding((name,), message, hint, at_key=True, code="ROLL-C015"))

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _pipeline(self) -> PipelineProvider | None:
        """The requested pipeline. If its name is misspelt, the most similar one, so that the rest is also checked."""
        available = ", ".join(self.registry.names(PipelineProvider)) or "none"
        if "pipeline" not in self.data:
            self.found.append(
                Finding(("pipeline",), "is missing", f"available: {available}", at_key=True, code="ROLL-C011")
            )
            return None
        name = self.data["pipeline"]
        if not isinstance(name, str):
            message = f"found {show(name)}, expected the name of a pipeline"
            self.found.append(Finding(("pipeline",), message, f"available: {available}", code="ROLL-C013"))
            return None
        provider = self._find(PipelineProvider, name, ("pipeline",))
        if provider is None:
            import difflib

            close = difflib.get_close_matches(name, self.registry.names(PipelineProvider), 1, 0.6)
            candidates = [each for each in self.registry.providers(PipelineProvider) if each.name in close]
            if len(candidates) == 1:
                return candidates[0]
        return provider

    def _find(
        self, kind: type[P], name: str, path: KeyPath, role: Mapping[Any, Any] = MappingProxyType({})
    ) -> P | None:
        """The record for a name; None after recording why there is none. Also records problems that would prevent the
        part from working in the processes of its role."""
        try:
            provider = self.registry.find(kind, name)
        except PluginError as error:
            message, _, hint = str(error).partition("\n    ")
            self.found.append(Finding(path, message, hint, code=error.code))
            if isinstance(error, UnknownProviderError) and self.cause is None:
                self.cause = error.__cause__
            return None
        if problem := signature_problem(provider):
            self.found.append(Finding(path, f"{self.registry.owner(provider)}: {problem}", code="ROLL-P003"))
        # Requirements of defaults are in roll-core[train], which `run` checks.
        if path[0] in self.data and self._runs_here(role):
            try:
                check_requirements(provider, owner=self.registry.owner(provider))
            except MissingRequirementError as error:
                message, _, hint = str(error).partition(". Run: ")
                self.found.append(Finding(path, message, hint and f"run: {hint}", code=error.code))
        return provider

    def _named_parts(self, schema: type[RunConfig]) -> None:
        for key, kind in NAMED_PARTS.items():
            name = self.data.get(key, schema.model_fields[key].default if key in schema.model_fields else None)
            if key not in schema.model_fields or not isinstance(name, str):
                continue
            provider = self._find(kind, name, (key,))
            if provider is not None and (options_key := OPTIONS.get(kind)):
                self._options(provider, (options_key,), self.data.get(options_key))
            if isinstance(provider, AdvantageProvider):
                self._estimator(provider, key, schema)
        trackers = self.data.get("track_with", schema.model_fields["track_with"].default)
        single = isinstance(trackers, str)
        names = [trackers] if single else trackers if isinstance(trackers, list) else []
        options = self.data.get("tracker_kwargs") or {}
        for position, name in enumerate(names):
            if isinstance(name, str):
                tracker = self._find(
                    TrackerProvider, name, ("track_with",) if single else ("track_with", str(position))
                )
                if tracker is not None and isinstance(options, dict):
                    self._options(tracker, ("tracker_kwargs", name), options.get(name))
        if isinstance(options, dict):
            for key in options:
                if isinstance(key, str) and key not in names:
                    message = f"is not used: track_with names {', '.join(map(str, names)) or 'no tracker'}"
                    self.found.append(Finding(("tracker_kwargs", key), message, at_key=True, code="ROLL-C015"))

    def _estimator(self, provider: AdvantageProvider, key: str, schema: type[RunConfig]) -> None:
        """Check the rest of the config against the requirements of an advantage estimator."""
        name, data = provider.name, self.data
        if provider.needs_critic and "critic" in schema.model_fields and data.get("critic") is None:
            message = f"{name} reads a critic's values, but there is no role critic"
            self.found.append(
                Finding((key,), message, "add the role critic, or take an estimator without one", code="ROLL-C014")
            )
        if provider.needs_groups and data.get("num_return_sequences_in_group") == 1:
            message = f"{name} compares the samples of one prompt, so each prompt needs at least 2"
            self.found.append(Finding(("num_return_sequences_in_group",), message, code="ROLL-C014"))
        for norm in ("norm_mean_type", "norm_std_type") if provider.normalise != "config" else ():
            if data.get(norm) not in (None, provider.normalise):
                message = f"{name} normalises rewards itself, by {provider.normalise}"
                hint = f"leave {norm} out, or choose an estimator that does not normalise (adv_estimator: reinforce)"
                self.found.append(Finding((norm,), message, hint, code="ROLL-C014"))

    def _options(self, record: Provider, path: KeyPath, given: Any) -> None:
        """Validate the options of a part that is not a role by its schema. Without a schema, it takes no options."""
        given = {} if given is None else given
        if isinstance(given, dict) and (given or record.config):
            owner = self.registry.owner(record)
            self._by_schema(schema_of(record, Config, owner=owner), given, path, owner)

    def _by_schema(self, schema: type[M], given: dict[Any, Any], path: KeyPath, owner: str) -> M | None:
        """Validate the values at `path` by the schema of their part; None after recording mistakes."""
        self.extra_paths += [(*path, *each) for each in paths(schema)]
        valid, found = validate_all(schema, given, owner)
        for each in found:
            unknown = each.kind == "extra_forbidden" and len(each.path) == 1
            known = sorted(schema.model_fields)
            self.found.append(self._with_key_hint(each, known, path) if unknown else _under(path, each))
        return valid

    def _reward(self, path: KeyPath, role: dict[Any, Any]) -> None:
        """Validate a reward by the schema of its provider, and replace its raw values by the result."""
        name = role.get("reward")
        schema: type[RewardConfig] = RewardConfig
        owner = "roll-core"
        if isinstance(name, str):
            provider = self._find(RewardProvider, name, (*path, "reward"), role)
            if provider is not None:
                owner = self.registry.owner(provider)
                schema = schema_of(provider, RewardConfig, owner=owner)
        if role.get("strategy_args") is not None:
            self.found.append(
                Finding((*path, "strategy_args"), "a reward takes no strategy", at_key=True, code="ROLL-C017")
            )
        self.extra_paths += [(*path, *each) for each in paths(schema)]
        known = set(schema.model_fields)
        unjudged = isinstance(name, str) and schema is RewardConfig
        if isinstance(name, str):
            role["reward"] = name.rpartition("/")[2]
        reward, found = validate_all(schema, role, owner)
        for each in found:
            unknown = each.kind == "extra_forbidden" and len(each.path) == 1
            if unknown and unjudged and any(finding.path == (*path, "reward") for finding in self.found):
                continue  # the schema of an unknown reward is unknown
            self.found.append(self._with_key_hint(each, sorted(known), path) if unknown else _under(path, each))
        replaced = schema.model_construct(reward="") if reward is None else _restore_name(reward, "reward", str(name))
        self.data[path[0]][self._key(self.data[path[0]], path[1])] = replaced

    def _strategy(self, path: KeyPath, worker: type[WorkerConfig], role: dict[Any, Any]) -> None:
        """Look up the strategy, validate its `strategy_config`, and compute `num_gpus_per_worker`."""
        arguments = role.get("strategy_args")
        if not isinstance(arguments, dict) or not isinstance(arguments.get("strategy_name"), str):
            return
        name = arguments["strategy_name"]
        at_name = (*path, "strategy_args", "strategy_name")
        at_config = (*path, "strategy_args", "strategy_config")
        provider: TrainProvider | InferProvider | None
        if worker.kind == "generate":
            provider = self._find(InferProvider, name, at_name, role)
        else:
            provider = self._find(TrainProvider, name, at_name, role)
        if provider is None:
            self._other_registry(worker, name, at_name)
            _suppose_one_replica(role)
            return
        self._suits(path, worker, role, provider)
        owner = self.registry.owner(provider)
        schema = schema_of(provider, StrategyConfig, owner=owner)
        raw = arguments.get("strategy_config")
        if raw is not None and not isinstance(raw, dict):
            _suppose_one_replica(role)
            return
        strategy = self._by_schema(schema, raw or {}, at_config, owner)
        hidden = any(each[: len(at_config)] == at_config for each in self.composed.broken)
        if hidden or strategy is None:
            if _spreads(schema):
                _suppose_one_replica(role)
        else:
            self._slots(path, worker, role, provider, strategy)
            self._replicas(path, role, provider, strategy)
            if worker.kind == "generate" or path == (self.policy_role,):
                self._router_replay(path, provider, strategy)
            if worker.kind == "generate":
                self._engine(path, role, provider, strategy)
                self._weights(at_name, provider)
            else:
                self._spread(path, role, strategy)

    def _engine(
        self, path: KeyPath, role: dict[Any, Any], provider: TrainProvider | InferProvider, strategy: StrategyConfig
    ) -> None:
        """Check that the engine can receive weights as its `strategy_config` says: format, adapters and model."""
        at_config = (*path, "strategy_args", "strategy_config")
        given, computed = role.get("weight_format"), strategy.weight_format()
        if isinstance(given, str) and given != computed:
            message = f"found {given}, but {provider.name}'s strategy_config makes it {computed}"
            self.found.append(Finding((*path, "weight_format"), message, "leave it out", code="ROLL-C016"))
        elif computed != "dtype":
            role["weight_format"] = computed
        if strategy.serves_adapters() and not any(map(_trains_adapters, self._model_args())):
            message = f"asks {provider.name} for adapters as they are, but no role trains any"
            hint = "set lora_target in the model_args of the role that is trained, or let it send whole weights"
            self.found.append(Finding(at_config, message, hint, code="ROLL-C014"))
        policy = self.data.get(self.policy_role)
        source = policy if isinstance(policy, dict) else role
        keys = model_keys(source.get("model_args"), self.data.get("pretrain"))
        try:
            strategy.check_model(keys)
        except ValueError as error:
            self.found.append(Finding(at_config, str(error), code="ROLL-C018"))
        self._architecture(path, role, (self.policy_role,) if source is policy else path, strategy, keys)
        try:
            strategy.check_lengths(self._length("prompt_length"), self._longest_response(role))
        except ValueError as error:
            self.found.append(Finding(at_config, str(error), kind="value_error"))

    def _longest_response(self, role: dict[Any, Any]) -> int:
        """Maximum response length in tokens, over rollouts and validation."""
        longest = []
        for each in (role, self.data.get("validation")):
            if isinstance(each, dict):
                given = each.get("generating_args")
                tokens = given.get("max_new_tokens") if isinstance(given, dict) else None
                longest.append(tokens if type(tokens) is int else self._length("response_length"))
        return max(longest)

    def _length(self, key: str) -> int:
        """A number of tokens as written; the default if the value is invalid."""
        given, default = self.data.get(key), RunConfig.model_fields[key].default
        return given if type(given) is int else int(default)

    def _weights(self, at_name: KeyPath, engine: TrainProvider | InferProvider) -> None:
        """Check that a weight transport connects the policy's strategy to this engine."""
        policy = self.data.get(self.policy_role)
        arguments = policy.get("strategy_args") if isinstance(policy, dict) else None
        name = arguments.get("strategy_name") if isinstance(arguments, dict) else None
        if not isinstance(engine, InferProvider) or not isinstance(name, str):
            return
        try:
            trainer = self.registry.find(TrainProvider, name)
        except PluginError:  # reported at the policy's own key
            return
        finding = weight_finding(self.registry, trainer, engine, self.data, at_name)
        if finding is not None:
            self.found.append(finding)

    def _model_args(self) -> Iterator[dict[Any, Any]]:
        """Raw `model_args` of all roles."""
        for role in self.data.values():
            if isinstance(role, dict) and isinstance(role.get("model_args"), dict):
                yield role["model_args"]

    def _environment(self, path: KeyPath, role: dict[Any, Any]) -> None:
        """Check that an interpreter given by its path exists, unless workers run on the hosts of a cluster."""
        given = role.get("environment")
        at = (*path, "environment") if isinstance(given, str) else (*path, "environment", "python")
        python = given.get("python") if isinstance(given, dict) else given
        if (
            isinstance(python, str)
            and os.sep in python
            and not _on_a_cluster()
            and not Path(python).expanduser().exists()
        ):
            message = f"there is no {python}"
            self.found.append(
                Finding(at, message, "name an interpreter, or the folder of a virtual environment", code="ROLL-C003")
            )

    def _other_registry(self, worker: type[WorkerConfig], name: str, at_name: KeyPath) -> None:
        """Improve the message if the name exists, but for roles of the other kind."""
        other: type[Provider] = TrainProvider if worker.kind == "generate" else InferProvider
        if name in self.registry.names(other) and self.found[-1].path == at_name:
            last = self.found.pop()
            does = "trains or scores" if worker.kind == "generate" else "generates"
            wanted = "generates" if worker.kind == "generate" else "trains" if worker.kind == "train" else "only scores"
            self.found.append(Finding(at_name, f"{name} {does}, but this role {wanted}", last.hint, code="ROLL-C017"))

    def _suits(
        self, path: KeyPath, worker: type[WorkerConfig], role: dict[Any, Any], provider: TrainProvider | InferProvider
    ) -> None:
        at_name = (*path, "strategy_args", "strategy_name")
        if worker.kind == "train" and isinstance(provider, TrainProvider) and provider.forward_only:
            trained = [each.name for each in self.registry.providers(TrainProvider) if not each.forward_only]
            message = f"{provider.name} has no optimizer, but this role is trained"
            self.found.append(
                Finding(at_name, message, f"strategies that train: {', '.join(trained)}", code="ROLL-C017")
            )
        platform = self.data.get("platform")
        if isinstance(platform, str) and provider.platforms and platform not in provider.platforms:
            message = f"{provider.name} runs on {', '.join(provider.platforms)}, but platform is {platform}"
            others = [
                each.name for each in self.registry.providers(type(provider)) if _replaces(each, provider, platform)
            ]
            self.found.append(
                Finding(
                    at_name, message, f"strategies that do: {', '.join(others)}" if others else "", code="ROLL-C017"
                )
            )
        capabilities = provider.capabilities
        moves = capabilities.sleeps if isinstance(capabilities, InferCapabilities) else capabilities.offload
        if role.get("is_offload_states") is True and not moves:
            message = f"{provider.name} moves nothing off its slots"
            self.found.append(
                Finding((*path, "is_offload_states"), message, "leave it out, or write false", code="ROLL-C017")
            )
        raw = role.get("model_args")
        model = raw if isinstance(raw, dict) else {}
        if worker.kind == "train" and not provider.capabilities.lora and _trains_adapters(model):
            known = self.registry.providers(TrainProvider)
            able = [other.name for other in known if other.capabilities.lora and not other.forward_only]
            hint = f"strategies that do: {', '.join(able)}"
            message = f"{provider.name} trains no adapters"
            self.found.append(Finding((*path, "model_args", "lora_target"), message, hint, code="ROLL-C017"))
        if isinstance(provider, TrainProvider) and not provider.capabilities.gradient_checkpointing:
            self._no_gradient_checkpointing(path, worker, role, provider)
        if self.data.get("portable_checkpoints") is True and worker.kind == "train" and not exports_state(provider):
            message = f"{provider.name} does not export its training state, so portable_checkpoints cannot be honoured"
            self.found.append(Finding(at_name, message, "leave portable_checkpoints out", code="ROLL-C017"))
        dtype = model.get("dtype")
        if isinstance(dtype, str) and dtype in ("fp32", "bf16", "fp16") and dtype not in provider.capabilities.dtypes:
            message = f"{provider.name} does not compute in {dtype}"
            hint = f"it computes in {', '.join(provider.capabilities.dtypes)}"
            self.found.append(Finding((*path, "model_args", "dtype"), message, hint, code="ROLL-C017"))

    def _no_gradient_checkpointing(
        self, path: KeyPath, worker: type[WorkerConfig], role: dict[Any, Any], provider: TrainProvider
    ) -> None:
        """Set `disable_gradient_checkpointing` for a strategy without gradient checkpointing; record a mistake if it is
        false."""
        raw, key = role.get("model_args"), "disable_gradient_checkpointing"
        model = {} if raw is None else raw
        if worker.kind != "train" or not isinstance(model, dict):
            return
        if model.get(key) is False:
            message = f"found false, but {provider.name} does not checkpoint gradients"
            self.found.append(
                Finding((*path, "model_args", key), message, "leave it out, or write true", code="ROLL-C017")
            )
        elif key not in model:
            role["model_args"] = model | {key: True}

    def _slots(
        self,
        path: KeyPath,
        worker: type[WorkerConfig],
        role: dict[Any, Any],
        provider: TrainProvider | InferProvider,
        strategy: StrategyConfig,
    ) -> None:
        """Set `num_gpus_per_worker` to the value that the strategy computes; record a mistake if it contradicts."""
        given = role.get("num_gpus_per_worker")
        computed = strategy.slots_per_worker()
        self._nodes(path, role, computed or given)
        spreads = isinstance(provider, InferProvider) and provider.capabilities.tensor_parallel
        if computed is None:
            if not spreads and type(given) is int and given > 1:
                message = f"found {given}, but a worker of {provider.name} takes 1 slot"
                hint = "more workers are more slots in device_mapping"
                self.found.append(Finding((*path, "num_gpus_per_worker"), message, hint, code="ROLL-C019"))
            return
        if computed > 1 and not spreads:
            message = f"makes a worker take {computed} slots, but {provider.name} does not declare tensor_parallel"
            self.found.append(Finding((*path, "strategy_args", "strategy_config"), message, code="ROLL-C019"))
        if type(given) is int and given > 0 and given != computed:
            message = f"found {given}, but {provider.name}'s strategy_config makes it {computed}"
            self.found.append(
                Finding((*path, "num_gpus_per_worker"), message, f"leave it out, or write {computed}", code="ROLL-C016")
            )
        elif given is None and role.get("device_mapping") is not None:
            role["num_gpus_per_worker"] = computed

    def _nodes(self, path: KeyPath, role: dict[Any, Any], per_worker: object) -> None:
        """Check that the slots of each worker are on one node, if `num_gpus_per_node` is given."""
        per_node, mapping = self.data.get("num_gpus_per_node"), role.get("device_mapping")
        if type(per_node) is not int or per_node < 1 or type(per_worker) is not int or per_worker < 2:
            return
        try:
            slots = parse_device_mapping(mapping)
        except ValueError:  # reported when the role itself is validated
            return
        for rank, start in enumerate(range(0, len(slots), per_worker)):
            mine = slots[start : start + per_worker]
            nodes = sorted({slot // per_node for slot in mine})
            if len(nodes) > 1:
                message = (
                    f"worker {rank} takes slots {', '.join(map(str, mine))}, which lie on nodes"
                    f" {', '.join(map(str, nodes))} of num_gpus_per_node {per_node} slots each"
                )
                hint = "the slots of one worker lie on one node: change device_mapping, or spread the model over fewer"
                self.found.append(Finding((*path, "device_mapping"), message, hint, code="ROLL-C019"))
                return

    def _replicas(
        self, path: KeyPath, role: dict[Any, Any], provider: TrainProvider | InferProvider, strategy: StrategyConfig
    ) -> None:
        """Set `ranks_per_replica` to the value that the strategy computes; check that it divides the role's number of
        ranks."""
        given, computed = role.get("ranks_per_replica"), strategy.ranks_per_replica()
        if type(given) is int and given > 0 and given != computed:
            message = f"found {given}, but {provider.name}'s strategy_config makes it {computed}"
            self.found.append(
                Finding((*path, "ranks_per_replica"), message, f"leave it out, or write {computed}", code="ROLL-C016")
            )
        elif computed > 1:
            role["ranks_per_replica"] = computed
        ranks = _num_ranks(role)
        if isinstance(provider, TrainProvider):
            self._explained(path, role, provider, strategy, ranks)
        if computed > 1 and ranks is not None and ranks % computed:
            message = f"{ranks} ranks are not a multiple of {strategy.replica_arithmetic()} = {computed}"
            hint = "the number of ranks is that product times data parallel"
            self.found.append(Finding((*path, "strategy_args", "strategy_config"), message, hint, code="ROLL-C019"))

    def _explained(
        self, path: KeyPath, role: dict[Any, Any], provider: TrainProvider, strategy: StrategyConfig, ranks: int | None
    ) -> None:
        """Check that the strategy declares the parallelism that explains the number of ranks. Otherwise ranks would
        train separate models that diverge."""
        can, sizes, replica = provider.capabilities, strategy.parallel_sizes(), strategy.ranks_per_replica()
        at_config = (*path, "strategy_args", "strategy_config")
        undeclared = [kind for kind, size in sizes.items() if size > 1 and not getattr(can, kind)]
        for kind in undeclared:
            message = f"asks for {kind} {sizes[kind]}, which {provider.name} does not declare"
            self.found.append(Finding(at_config, message, code="ROLL-C019"))
        declared = prod(size for kind, size in sizes.items() if kind != "expert_parallel" and getattr(can, kind))
        if replica > declared and not undeclared:
            message = f"spreads a replica over {replica} ranks, but {provider.name} declares parallelism for {declared}"
            self.found.append(Finding(at_config, message, code="ROLL-C019"))
        if ranks is not None and ranks > replica and not can.data_parallel:
            key = "world_size" if role.get("device_mapping") is None else "device_mapping"
            message = f"found {ranks} ranks, but {provider.name} has no data parallelism: a role has {replica} of them"
            self.found.append(
                Finding((*path, key), message, "take a strategy that declares data_parallel", code="ROLL-C019")
            )

    def _spread(self, path: KeyPath, role: dict[Any, Any], strategy: StrategyConfig) -> None:
        """Check that the model can be partitioned and computed as configured, as far as the model is known."""
        given = role.get("model_args")
        for check, keys in (
            (strategy.check_model, model_keys(given, self.data.get("pretrain"))),
            (strategy.check_model_args, given if isinstance(given, dict) else {}),
        ):
            try:
                check(keys)
            except ValueError as error:
                self.found.append(Finding((*path, "strategy_args", "strategy_config"), str(error), code="ROLL-C018"))
        self._architecture(path, role, path, strategy, model_keys(given, self.data.get("pretrain")))

    def _architecture(
        self, path: KeyPath, role: dict[Any, Any], source: KeyPath, strategy: StrategyConfig, keys: Mapping[str, Any]
    ) -> None:
        """Check that the packages in this environment support the model's architecture, if the role's workers run in
        it. The role at `source` names the model."""
        if not self._runs_here(role):
            return
        try:
            strategy.check_architecture(keys)
        except ValueError as error:
            name = role["strategy_args"]["strategy_name"]
            self.found.append(Finding(self._model_at(source), f"{name} of {'.'.join(path)}: {error}", code="ROLL-C018"))

    def _runs_here(self, role: Mapping[Any, Any]) -> bool:
        """True if this environment is the one in which the role's workers run."""
        return self.needs and role.get("environment") is None and not _on_a_cluster()

    def _model_at(self, path: KeyPath) -> KeyPath:
        """Key that names the model of the role at `path`."""
        for keys in (("random_init", "model_type"), ("model_name_or_path",)):
            if _is_written(self.data, found := (*path, "model_args", *keys)):
                return found
        return ("pretrain",)

    def _router_replay(self, path: KeyPath, provider: TrainProvider | InferProvider, strategy: StrategyConfig) -> None:
        """Check that engine and trainer of the policy support router replay with this model."""
        raw, policy = self.data.get("router_replay"), self.data.get(self.policy_role)
        if not isinstance(raw, dict) or raw.get("mode") != "R3" or not isinstance(policy, dict):
            return
        at_mode = ("router_replay", "mode")
        if not replays_experts(provider):
            others = [each for each in self.registry.providers(type(provider)) if replays_experts(each)]
            able = [each.name for each in others if not getattr(each, "forward_only", False)]
            does = "return the experts that it chose" if path != (self.policy_role,) else "replay an engine's experts"
            message = f"{provider.name} of {'.'.join(path)} does not {does}"
            hint = f"strategies that do: {', '.join(able)}; or write mode: disable"
            self.found.append(Finding(at_mode, message, hint, code="ROLL-C017"))
            return
        try:
            strategy.check_router_replay(model_keys(policy.get("model_args"), self.data.get("pretrain")))
        except ValueError as error:
            self.found.append(
                Finding(at_mode, f"R3 {error}", "write mode: disable, or leave router_replay out", code="ROLL-C018")
            )

    # -- problems ------------------------------------------------------------------------------------------------------

    def _error(self, schema: type[RunConfig]) -> ConfigError:
        problems: dict[ConfigProblem, KeyLocation] = {each: _place(each) for each in self.composed.problems}
        for each in self.found:
            if any(each.path[: len(path)] == path for path in self.composed.broken):
                continue
            problem, place = self._problem(each, schema)
            problems.setdefault(problem, place)
        error = ConfigError(sorted(problems, key=lambda problem: (problems[problem], problem.key)))
        error.__cause__ = self.cause
        return error

    def _problem(self, found: Finding, schema: type[RunConfig]) -> tuple[ConfigProblem, KeyLocation]:
        written = self.composed.written
        if found.kind == "extra_forbidden" and not found.hint:
            siblings = schema_at(schema, found.path[:-1])
            found = self._with_key_hint(found, sorted(siblings.model_fields) if siblings else [], (), schema)
        if found.kind == "missing" or (found.path == ("pipeline",) and "pipeline" not in self.composed.data):
            place = written.key(found.path[:-1])
        else:
            path = self._subject(found)
            place = written.key(path) if found.at_key else written.value(path)
        message = found.message
        through = None if found.at_key else written.through(found.path)
        if through is not None:
            interpolation, target = through
            source = f", written at {target}" if target is not None else ""
            if interpolation.from_environment and found.shown:
                # Do not show the value of an environment variable: it may be intended for another key.
                message = message.replace(found.shown, "text" if found.shown[0] in "'\"" else "a value", 1)
                found = replace(found, hint="${oc.decode:${oc.env:NAME}} reads a variable as a number, a list, …")
            message += f" (from {interpolation.text}{source})"
        *above, last = found.path or ("",)
        if found.kind == "invalid_key" and last in ("True", "False"):
            last = last.lower()  # as YAML spells it
        return ConfigProblem(str(place), ".".join((*above, last)), message, found.hint, code_of(found)), place

    def _subject(self, found: Finding) -> KeyPath:
        """Path to point at. A rule about several keys concerns a whole mapping. It is located at the first key that the
        message names and the config contains."""
        if found.kind != "value_error":
            return found.path
        for words in re.findall(r"[A-Za-z_][\w.]*", found.message):
            path = (*found.path, *words.rstrip(".").split("."))
            if _is_written(self.composed.data, path):
                return path
        return found.path

    def _with_key_hint(
        self, found: Finding, siblings: list[str], prefix: KeyPath, schema: type[BaseModel] | None = None
    ) -> Finding:
        path = prefix + found.path
        self.suggestions += 1
        hint = ""
        if self.suggestions <= MAX_SUGGESTIONS:
            everywhere = [*(paths(schema) if schema is not None else ()), *self.extra_paths]
            hint = foreign_hint(path, self._written_at(path), everywhere) if schema is not None else ""
            hint = hint or suggest_key(path, siblings, everywhere)[0]
        return Finding(path, found.message, hint, at_key=True, kind=found.kind, code=found.code)

    def _written_at(self, path: KeyPath) -> Any:
        data: Any = self.composed.data
        for step in path:
            data = data.get(step) if isinstance(data, dict) else None
        return data

    @staticmethod
    def _key(mapping: dict[Any, Any], text: str) -> Any:
        """The key whose text is `text`."""
        return next(key for key in mapping if str(key) == text)


def _place(problem: ConfigProblem) -> KeyLocation:
    """Position in a problem's text, for sorting."""
    name, line, column = [*problem.where.rsplit(":", 2), "", ""][:3]
    if line.isdigit() and column.isdigit():
        return KeyLocation(0, int(line), int(column), name)
    return KeyLocation(MAX_LAYER if problem.where == COMMAND_LINE else 0, 0, 0, problem.where)


def _restore_name(config: M, key: str, name: str) -> M:
    """Restore the name as written: schemas use a part's bare name, a config may contain `package/name`."""
    return config if getattr(config, key) == name else config.model_copy(update={key: name})


def _is_written(data: Any, path: KeyPath) -> bool:
    for step in path:
        if not isinstance(data, dict) or step not in data:
            return False
        data = data[step]
    return True


def _on_a_cluster() -> bool:
    """True if workers run on the hosts of a Ray cluster, which may have other files and packages."""
    return os.environ.get("RAY_ADDRESS", "local") not in ("", "local")


def _num_ranks(role: Mapping[Any, Any]) -> int | None:
    """Number of ranks of a role that trains or scores, one per slot; None if its values are invalid."""
    mapping, size = role.get("device_mapping"), role.get("world_size")
    if mapping is None:
        return 1 if size is None else size if type(size) is int else None
    try:
        return len(parse_device_mapping(mapping))
    except ValueError:  # reported when the role itself is validated
        return None


def _spreads(schema: type[StrategyConfig]) -> bool:
    """True if a strategy's configuration can spread a replica over several ranks."""
    base = StrategyConfig
    return schema.ranks_per_replica is not base.ranks_per_replica or schema.parallel_sizes is not base.parallel_sizes


def _suppose_one_replica(role: dict[Any, Any]) -> None:
    """If the number of ranks per replica is unknown, assume that all ranks share one. A batch size that does not divide
    then is wrong for any number of replicas, so no false mistake is reported."""
    ranks = _num_ranks(role)
    if ranks is not None and role.get("ranks_per_replica") is None:
        role["ranks_per_replica"] = ranks


def _replaces(other: Provider, refused: Provider, platform: str) -> bool:
    """True if a strategy supports `platform` and can replace the rejected one."""
    platforms = getattr(other, "platforms", ())
    same = getattr(other, "forward_only", False) == getattr(refused, "forward_only", False)
    return same and (not platforms or platform in platforms)


def _trains_adapters(model_args: dict[Any, Any]) -> bool:
    """True if `model_args` as written enable LoRA."""
    return bool(model_args.get("lora_target")) and bool(model_args.get("lora_rank", True))


def _under(prefix: KeyPath, found: Finding) -> Finding:
    return Finding(prefix + found.path, found.message, found.hint, found.at_key, found.kind, code=found.code)
