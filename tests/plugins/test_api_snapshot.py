"""The plugin API, literally. A change here is a change for every plugin: additions keep HOOK_API, removals need a
warning release first (docs/plugins.md, "Versions")."""

import ast
import inspect
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

import roll_core
from roll_core.errors import ContractError
from roll_core.plugins.records import KINDS
from roll_core.runtime.workers.build import role_config
from roll_core.spec import (
    HOOK_API,
    agent,
    diagnostics,
    environment,
    hooks,
    infer,
    pipeline,
    platform,
    providers,
    rollout,
    train,
    transport,
)
from roll_core.spec.config import RunConfig
from roll_testing.errors import raises_error

HOOKS = {
    "roll_platforms": [],
    "roll_train_strategies": [],
    "roll_infer_strategies": [],
    "roll_pipelines": [],
    "roll_rewards": [],
    "roll_environments": [],
    "roll_agents": [],
    "roll_trackers": [],
    "roll_advantage_estimators": [],
    "roll_policy_losses": [],
    "roll_weight_transports": [],
    "roll_executors": [],
    "roll_config_fragments": [],
    "roll_checks": [],
    "roll_known_errors": [],
    "roll_importers": [],
    "roll_commands": [],
    "roll_run_started": ["run"],
    "roll_step_finished": ["run", "step", "metrics"],
    "roll_run_finished": ["run", "error"],
    "roll_run_recorded": ["directory"],
}
BASE = ["name", "target", "summary", "config", "needs"]
RECORDS = {
    "PlatformProvider": [*BASE, "priority"],
    "TrainProvider": [*BASE, "capabilities", "platforms", "forward_only", "memory"],
    "InferProvider": [*BASE, "capabilities", "platforms", "memory"],
    "PipelineProvider": [*BASE, "plan", "tokenizer", "starter"],
    "RewardProvider": [*BASE, "enforces_timeout"],
    "EnvironmentProvider": [*BASE, "isolation", "concurrency"],
    "AgentProvider": [*BASE, "isolation", "concurrency"],
    "TrackerProvider": BASE,
    "AdvantageProvider": [
        *BASE, "needs_critic", "needs_groups", "needs_baseline", "non_negative", "needs_turns", "normalise",
    ],
    "PolicyLossProvider": [*BASE, "off_policy", "whole_rollouts"],
    "WeightTransportProvider": [*BASE, "priority", "in_process", "any_strategy", "uses_directory"],
    "ExecutorProvider": [
        *BASE, "priority", "in_process", "python_environments", "address_variable", "placement_timeout_s",
    ],
    "FragmentProvider": BASE,
    "CheckProvider": [*BASE, "platform"],
    "KnownErrorsProvider": [*BASE, "general"],
    "ImporterProvider": BASE,
    "CommandProvider": BASE,
}  # fmt: skip
CHECKS = {
    "CheckResult": ["level", "found", "wanted", "remedy", "subject"],
    "CheckContext": ["platform", "config", "environments"],
    "RoleEnvironment": ["config", "package", "needs"],
}
CAPABILITIES = {
    "TrainCapabilities": [
        "tasks", "dtypes", "gradient_checkpointing", "data_parallel", "tensor_parallel",
        "pipeline_parallel", "context_parallel", "expert_parallel", "lora", "adapter_export", "offload", "topk",
        "ema", "module_programs", "gathered", "whole_vocabulary", "portable_state", "router_replay", "any_world_size",
        "weight_transports",
    ],
    "InferCapabilities": [
        "dtypes", "sleeps", "lora", "prompt_logprobs", "prompt_topk", "routed_experts", "seeds", "free_seeds",
        "in_flight_update", "endpoint", "tensor_parallel", "device_weights", "weight_transports",
    ],
}  # fmt: skip
METHODS = {
    platform.Platform: {
        "probe!": "(self)",
        "device_count!": "(self)",
        "device": "(self, local_index)",
        "supports!": "(self, dtype)",
        "environment": "(self, kind, local_indices)",
        "memory!": "(self, local_index)",
    },
    train.TrainStrategy: {
        "build!": "(self, model, mesh)",
        "data_rank": "property",
        "microbatch_multiple": "property",
        "forward!": "(self, micro, want)",
        "forward_all": "(self, micros, want)",
        "forward_backward!": "(self, micros, loss)",
        "run_module": "(self, batches, program)",
        "forward_backward_module": "(self, batches, loss)",
        "optimizer_step!": "(self)",
        "move_averages": "(self)",
        "export_weights!": "(self)",
        "export_adapters": "(self)",
        "save!": "(self, path)",
        "load!": "(self, path)",
        "export_state": "(self)",
        "import_state": "(self, state)",
        "export_model": "(self, path)",
        "export_head": "(self, path)",
        "offload": "(self, parts)",
        "onload": "(self, parts)",
        "memory": "(self)",
        "close": "(self)",
    },
    infer.InferStrategy: {
        "start!": "(self, model, mesh)",
        "generate!": "(self, request)",
        "abort!": "(self, ids)",
        "progress": "(self)",
        "update_weights!": "(self, version, manifest, tensors, *, shared=False)",
        "sleep": "(self)",
        "wake": "(self)",
        "endpoint": "(self)",
        "metrics": "(self)",
        "stop!": "(self)",
    },
    rollout.RewardFunction: {"start": "(self)", "score!": "(self, request)", "close": "(self)"},
    rollout.EngineReward: {"messages!": "(self, request)"},
    environment.Environment: {
        "reset!": "(self, task, seed)",
        "step!": "(self, reply)",
        "score": "(self)",
        "close": "(self)",
    },
    agent.Agent: {"run!": "(self, task, session)", "close": "(self)"},
    transport.WeightTransport: {
        "available!": "(self, sender, receiver)",
        "routes": "(self, sender, receiver)",
        "sender": "(self, setup)",
        "receiver": "(self, setup)",
        "cancel_transfer": "(self, address, options)",
        "buffers": "(self, sizes)",
    },
    transport.SenderEndpoint: {"send!": "(self, manifest, exported, deadline)", "close!": "(self)"},
    transport.ReceiverEndpoint: {"receive!": "(self, manifest, deadline)", "close!": "(self)"},
    pipeline.Tracker: {
        "log!": "(self, step, metrics)",
        "log_config": "(self, config)",
        "stage": "(self, name)",
        "run_finished": "(self, *, failed, files)",
        "close!": "(self)",
    },
    pipeline.Pipeline: {
        "prepare!": "(self, run)",
        "roles!": "(self)",
        "setup": "(self, run)",
        "step!": "(self, run)",
        "evaluate": "(self, run)",
        "state": "(self)",
        "load_state": "(self, state)",
        "close": "(self)",
        "export_role": "(self)",
    },
    rollout.RolloutProgram: {
        "run!": "(self, context, prompt)",
        "snapshot": "(self)",
        "restore": "(self, state)",
    },
    rollout.RolloutContext: {
        "generate!": "(self, prompt_ids, *, n=1, params=None, key='', on_progress=None)",
        "score!": "(self, group)",
    },
}
FACTS = {
    "DeviceFacts": ["device", "backend", "uuid", "is_leader", "replica"],
    "WorkerFacts": ["host", "pid", "node", "slots", "device"],
    "RoleFacts": ["role", "workers", "weight_transports", "directory"],
    "Route": ["label", "sources", "options", "self_test", "note"],
    "WeightSizes": ["total_bytes", "largest_bytes", "bucket_bytes"],
    "BufferSizes": ["sender_bytes", "receiver_bytes", "formula", "on"],
    "SenderSetup": ["receivers", "bucket_bytes", "host", "device", "options"],
    "ReceiverSetup": ["address", "rank", "num_receivers", "bucket_bytes", "deadline", "device", "options"],
}
CONSTRUCTORS = {
    platform.Platform: "(self, /, *args, **kwargs)",
    train.TrainStrategy: "(self, config, training)",
    infer.InferStrategy: "(self, config)",
    rollout.RewardFunction: "(self, config)",
    pipeline.Tracker: "(self, run_dir, run_name, options)",
    pipeline.Pipeline: "(self, config)",
}


def bare(signature):
    """A signature without annotations: they are strings whose spelling may change."""
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(inspect.Signature(parameters))


def methods_of(contract):
    found = {}
    for name, value in vars(contract).items():
        if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, property)):
            continue
        function = value.fget if isinstance(value, property) else value
        mark = "!" if getattr(function, "__isabstractmethod__", False) else ""
        found[name + mark] = "property" if isinstance(value, property) else bare(inspect.signature(value))
    return found


def test_the_hook_api_is_the_first():
    assert HOOK_API == 1


def test_hooks_and_their_arguments():
    found = {
        name: list(inspect.signature(value).parameters)
        for name, value in vars(hooks).items()
        if name.startswith("roll_")
    }
    assert found == HOOKS


def test_records_and_their_fields():
    found = {
        name: [each.name for each in fields(value)]
        for name, value in vars(providers).items()
        if name.endswith("Provider") and name != "Provider"
    }
    assert found == RECORDS


def test_capabilities_and_their_fields():
    found = {name: [each.name for each in fields(getattr(providers, name))] for name in CAPABILITIES}
    assert found == CAPABILITIES


@pytest.mark.parametrize("record", CAPABILITIES)
def test_every_capability_is_read_by_the_runtime_or_by_check(record):
    """One that nothing reads would promise what nobody honours. Kinds of model parallelism are read by their names:
    tests/config/test_strategy_schemas.py has each of them."""
    read = set(get_args(providers.ModelParallelism)) if record == "TrainCapabilities" else set()
    for pattern in ("config/**/*.py", "runtime/**/*.py", "pipelines/**/*.py", "spec/providers.py"):
        for path in Path(roll_core.__file__).parent.glob(pattern):
            read |= {name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) for name in _asked(node)}
    assert not set(CAPABILITIES[record]) - read


def _asked(node):
    """Names of capabilities that an expression reads."""
    if isinstance(node, ast.Attribute):
        of = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
        return [node.attr] if of in ("capabilities", "can") else []
    if isinstance(node, ast.For) and "getattr(self.capabilities, name)" in ast.unparse(node):
        return [each.value for each in ast.walk(node.iter) if isinstance(each, ast.Constant)]
    asks = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr"
    return [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)] if asks else []


def test_what_checks_get_and_yield():
    assert {name: [each.name for each in fields(getattr(diagnostics, name))] for name in CHECKS} == CHECKS


def test_what_weight_transports_get_and_return():
    assert {name: [each.name for each in fields(getattr(transport, name))] for name in FACTS} == FACTS


def test_kinds_of_roles_and_tasks():
    assert platform.ROLE_KINDS == ("train", "score", "generate", "reward")
    assert providers.TASKS == ("causal_lm", "value", "reward", "flow")


@pytest.mark.parametrize(("field", "value"), [("kind", "infer"), ("task", "lm"), ("kind", None)])
def test_a_role_of_an_unknown_kind_or_task_is_refused_where_it_is_made(field, value):
    with raises_error(ContractError, "RoleSpec", "'actor_infer'", field, value) as raised:
        pipeline.RoleSpec(**{"name": "actor_infer", "kind": "generate", field: value})
    known = platform.ROLE_KINDS if field == "kind" else providers.TASKS
    assert all(each in str(raised.value) for each in known)


def test_a_role_that_the_config_does_not_have_is_named():
    with raises_error(ContractError, "actor_infer"):
        role_config(RunConfig(pipeline="x"), "actor_infer")


def test_every_kind_of_record_has_a_hook():
    assert [kind.hook for kind in KINDS] == [name for name, arguments in HOOKS.items() if not arguments]
    assert [kind.record.__name__ for kind in KINDS] == list(RECORDS)


def test_contracts_and_their_methods():
    """`!` marks what a plugin has to implement."""
    assert {each.__name__: methods_of(each) for each in METHODS} == {
        each.__name__: methods for each, methods in METHODS.items()
    }


def test_contracts_and_their_constructors():
    found = {each.__name__: bare(inspect.signature(each.__init__)) for each in CONSTRUCTORS}
    assert found == {each.__name__: signature for each, signature in CONSTRUCTORS.items()}
