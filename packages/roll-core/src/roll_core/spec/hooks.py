"""The hooks of `roll.plugins`: the reference of what a plugin can provide.

A plugin is a lightweight module, named by one entry point of its distribution:

    [project.entry-points."roll.plugins"]
    roll-infer-acme = "roll_infer_acme.plugin"

    # roll_infer_acme/plugin.py
    from roll_core.spec.hooks import hookimpl
    from roll_core.spec.providers import InferProvider

    ROLL_HOOK_API = 1

    @hookimpl
    def roll_infer_strategies():
        yield InferProvider(name="acme", target="roll_infer_acme.strategy:AcmeStrategy", summary="Acme's engine")

Hooks that offer parts are called when plugins are listed. They yield records and must not import anything heavy. No
hook chooses between plugins: the config selects parts by name.

The examples below are whole modules `acme.py` without their imports. For brevity some define a part beside its hook;
in a package, keep the part in a module of its own, so that listing plugins does not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from roll_core.spec.pipeline import Run
    from roll_core.spec.providers import (
        AdvantageProvider,
        AgentProvider,
        CheckProvider,
        CommandProvider,
        EnvironmentProvider,
        ExecutorProvider,
        FragmentProvider,
        ImporterProvider,
        InferProvider,
        KnownErrorsProvider,
        OptimizerProvider,
        PipelineProvider,
        PlatformProvider,
        PolicyLossProvider,
        PromptSamplerProvider,
        RewardProvider,
        TrackerProvider,
        TrainProvider,
        WeightTransportProvider,
    )

PROJECT = "roll"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's function as the implementation of the hook with the same name."""


# -- parts -------------------------------------------------------------------------------------------------------------


@hookspec
def roll_platforms() -> Iterable[PlatformProvider]:
    """Offer hardware platforms.

    ```python
    class AcmePlatform(Platform):
        name, device_type, resource_name = "acme", "cpu", "ACME"
        visible_devices, collective_backend = "ACME_VISIBLE_DEVICES", "gloo"

        def probe(self):
            found = Path("/dev/acme0").exists()
            return Probe(found=found, why="/dev/acme0 " + ("exists" if found else "does not exist"))

        def device_count(self):
            return len(list(Path("/dev").glob("acme*")))

        def supports(self, dtype):
            return "" if dtype in ("fp32", "bf16") else f"acme does not compute in {dtype}: set dtype: bf16"

        def memory(self, local_index):
            return {"total": 16 << 30, "used": 0}

    @hookimpl
    def roll_platforms():
        yield PlatformProvider(name="acme", target="acme:AcmePlatform", summary="Acme cards", priority=10)
    ```
    """
    yield from ()


@hookspec
def roll_train_strategies() -> Iterable[TrainProvider]:
    """Offer train strategies and their forward-only variants.

    ```python
    @hookimpl
    def roll_train_strategies():
        yield TrainProvider(
            name="acme",
            target="roll_strategy_acme.strategy:AcmeStrategy",  # written by `roll-core new strategy acme`
            config="roll_strategy_acme.config:AcmeStrategyConfig",
            summary="Trains a transformers model on one device",
            capabilities=TrainCapabilities(
                tasks=("causal_lm", "value", "reward"),
                dtypes=("fp32",),
                topk=True,
                gathered=True,
                weight_transports=("shared", "shm", "collective", "disk"),
            ),
        )
    ```
    """
    yield from ()


@hookspec
def roll_infer_strategies() -> Iterable[InferProvider]:
    """Offer inference engines.

    ```python
    @hookimpl
    def roll_infer_strategies():
        yield InferProvider(
            name="acme",
            target="roll_infer_acme.strategy:AcmeEngine",  # written by `roll-core new infer acme`
            config="roll_infer_acme.config:AcmeEngineConfig",
            summary="transformers' generate, one request at a time",
            capabilities=InferCapabilities(
                free_seeds=True, weight_transports=("shared", "shm", "collective", "disk")
            ),
        )
    ```
    """
    yield from ()


@hookspec
def roll_pipelines() -> Iterable[PipelineProvider]:
    """Offer pipelines, selected by the config's `pipeline:` key.

    ```python
    @hookimpl
    def roll_pipelines():
        yield PipelineProvider(
            name="acme",
            target="roll_pipeline_acme.pipeline:AcmePipeline",  # written by `roll-core new pipeline acme`
            config="roll_pipeline_acme.config:AcmePipelineConfig",
            plan="roll_pipeline_acme.plans:acme",
            summary="REINFORCE with the mean reward of a prompt's responses as baseline",
        )
    ```
    """
    yield from ()


@hookspec
def roll_rewards() -> Iterable[RewardProvider]:
    """Offer rewards, selected by `rewards.<domain>.reward`.

    ```python
    class Palindrome(RewardFunction):
        def score(self, request):
            return Reward(value=float(request.response == request.response[::-1]))

    @hookimpl
    def roll_rewards():
        yield RewardProvider(name="palindrome", target="acme:Palindrome", summary="1 for palindromes")
    ```
    """
    yield from ()


@hookspec
def roll_environments() -> Iterable[EnvironmentProvider]:
    """Offer environments, selected by `custom_envs.<tag>.environment`.

    ```python
    class Echo(Environment):
        def reset(self, task, seed):
            return Opening(messages=({"role": "user", "content": "Say hello."},))

        def step(self, reply):
            return Turn(reward=float("hello" in reply.text), done=True)

    @hookimpl
    def roll_environments():
        yield EnvironmentProvider(name="echo", target="acme:Echo", summary="One turn", isolation="thread")
    ```
    """
    yield from ()


@hookspec
def roll_agents() -> Iterable[AgentProvider]:
    """Offer agents, selected by `custom_envs.<tag>.agent`.

    ```python
    class AskOnce(Agent):
        async def run(self, task, session):
            from openai import AsyncOpenAI

            client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
            message = {"role": "user", "content": task["question"]}
            reply = await client.chat.completions.create(model="policy", messages=[message])
            return float(task["answer"] in reply.choices[0].message.content)

    @hookimpl
    def roll_agents():
        yield AgentProvider(name="ask_once", target="acme:AskOnce", summary="One call", needs=("openai>=1",))
    ```
    """
    yield from ()


@hookspec
def roll_trackers() -> Iterable[TrackerProvider]:
    """Offer metrics trackers, selected by `track_with`.

    ```python
    class PrintTracker(Tracker):
        def log(self, step, metrics):
            print(step, dict(metrics))

        def close(self):
            print("closed")

    @hookimpl
    def roll_trackers():
        yield TrackerProvider(name="print", target="acme:PrintTracker", summary="Prints metrics")
    ```
    """
    yield from ()


@hookspec
def roll_advantage_estimators() -> Iterable[AdvantageProvider]:
    """Offer advantage estimators, selected by `adv_estimator`.

    ```python
    def centred(batch):
        scores_S = batch.scores_S - batch.scores_S.mean()
        return AdvantageOutput(advantages_T=scores_S[batch.segments_T] * batch.mask_T)

    @hookimpl
    def roll_advantage_estimators():
        yield AdvantageProvider(name="centred", target="acme:centred", summary="Reward less its mean")
    ```
    """
    yield from ()


@hookspec
def roll_optimizers() -> Iterable[OptimizerProvider]:
    """Offer optimizers, selected by `training_args.optimizer`.

    ```python
    def rmsprop(parameters, training, alpha=0.99):
        return torch.optim.RMSprop(parameters.values(), lr=training.learning_rate, alpha=alpha)

    @hookimpl
    def roll_optimizers():
        yield OptimizerProvider(name="rmsprop", target="acme:rmsprop", summary="RMSprop", sharded=True)
    ```
    """
    yield from ()


@hookspec
def roll_policy_losses() -> Iterable[PolicyLossProvider]:
    """Offer policy losses, selected by `pg_variant`.

    ```python
    def likelihood(logprobs_T, micro, params):
        return -logprobs_T * micro.advantages_T, {}

    @hookimpl
    def roll_policy_losses():
        yield PolicyLossProvider(
            name="likelihood", target="acme:likelihood", summary="Weighted likelihood", off_policy=False
        )
    ```
    """
    yield from ()


@hookspec
def roll_prompt_samplers() -> Iterable[PromptSamplerProvider]:
    """Offer prompt samplers, selected by `prompt_sampler`.

    ```python
    class InOrder(PromptSampler):
        def start(self, rows, seed):
            self.num_rows = len(rows)

        def choose(self, position):
            return position % self.num_rows

    @hookimpl
    def roll_prompt_samplers():
        yield PromptSamplerProvider(name="in_order", target="acme:InOrder", summary="Rows in the order of the file")
    ```
    """
    yield from ()


@hookspec
def roll_weight_transports() -> Iterable[WeightTransportProvider]:
    """Offer transports from trainers to engines, selected by priority or by `weight_transport`.

    ```python
    @hookimpl
    def roll_weight_transports():
        yield WeightTransportProvider(
            name="acme",
            target="roll_transport_acme.transport:AcmeTransport",  # written by `roll-core new transport acme`
            summary="A TCP connection to each engine",
            any_strategy=True,
        )
    ```
    """
    yield from ()


@hookspec
def roll_executors() -> Iterable[ExecutorProvider]:
    """Offer executors, which start the workers of a run, selected by `executor`.

    ```python
    class LoggedExecutor(LocalExecutor):
        async def start(self, specs):
            print("workers:", [spec.name for spec in specs])
            return await super().start(specs)

    @hookimpl
    def roll_executors():
        yield ExecutorProvider(name="logged", target="acme:LoggedExecutor", summary="Local", in_process=True)
    ```
    """
    yield from ()


@hookspec
def roll_config_fragments() -> Iterable[FragmentProvider]:
    """Offer YAML files for the `defaults:` of configs.

    ```python
    @hookimpl
    def roll_config_fragments():
        yield FragmentProvider(
            name="acme_small",
            target="acme_fragments.config:acme_small.yaml",  # contains `acme_small: {heads: 4}`
            summary="Settings for small models",
        )
    ```
    """
    yield from ()


@hookspec
def roll_checks() -> Iterable[CheckProvider]:
    """Offer checks of the machine, the software and the config, for `roll-core doctor`.

    ```python
    def scratch(context):
        level = "ok" if Path("/tmp").is_dir() else "error"
        yield CheckResult(level=level, found="/tmp", remedy="create /tmp")

    @hookimpl
    def roll_checks():
        yield CheckProvider(name="scratch", target="acme:scratch", summary="Whether /tmp exists")
    ```
    """
    yield from ()


@hookspec
def roll_known_errors() -> Iterable[KnownErrorsProvider]:
    """Offer known errors of this package's engine, each with a remedy.

    ```python
    ERRORS = (
        KnownError(
            id="acme-licence",
            pattern=r"AcmeError: no licence",
            cause="Acme's engine found no licence.",
            remedy="Set ACME_LICENCE in system_envs.",
        ),
    )

    @hookimpl
    def roll_known_errors():
        yield KnownErrorsProvider(name="acme", target="acme:ERRORS", summary="Acme's licence")
    ```
    """
    yield from ()


@hookspec
def roll_importers() -> Iterable[ImporterProvider]:
    """Offer importers of other frameworks' configs, for `roll-core import NAME FILE`.

    ```python
    def import_acme(path, registry):
        seed = int(path.read_text())
        key = ImportedKey(f"{path}:1:1", "seed", "kept", ("seed",))
        return ImportedConfig(pipeline="sft", config={"pipeline": "sft", "seed": seed}, keys=(key,))

    @hookimpl
    def roll_importers():
        yield ImporterProvider(name="acme", target="acme:import_acme", summary="A file with a seed")
    ```
    """
    yield from ()


@hookspec
def roll_commands() -> Iterable[CommandProvider]:
    """Offer commands of `roll-core`.

    ```python
    def hello(words, registry):
        print("hello", *words)
        return 0

    @hookimpl
    def roll_commands():
        yield CommandProvider(name="hello", target="acme:hello", summary="Greet")
    ```
    """
    yield from ()


# -- events ------------------------------------------------------------------------------------------------------------
# Called in the driver, in order of registration. An exception ends the run; the error names the plugin's package.


@hookspec
def roll_run_started(run: Run) -> None:
    """All roles have been built; the first step has not started.

    ```python
    @hookimpl
    def roll_run_started(run):
        print("started", run.config.exp_name)
    ```
    """


@hookspec
def roll_step_finished(run: Run, step: int, metrics: Mapping[str, float]) -> None:
    """Step `step` (counted from 1) is done and its metrics are recorded.

    ```python
    @hookimpl
    def roll_step_finished(run, step, metrics):
        if metrics.get("score/mean", 0.0) > 0.99:
            print("solved at step", step)
    ```
    """


@hookspec
def roll_run_finished(run: Run, error: BaseException | None) -> None:
    """The run is over; `error` is the exception that ended it, or None.

    ```python
    @hookimpl
    def roll_run_finished(run, error):
        print("finished" if error is None else f"ended by {type(error).__name__}")
    ```
    """


@hookspec
def roll_run_recorded(directory: Path) -> Path | None:
    """The run directory `directory` is complete, with the outcome in its record. Returns the file that the plugin
    wrote, if any: the closing lines of the run show it. An exception is logged and does not change the outcome.

    ```python
    @hookimpl
    def roll_run_recorded(directory):
        print("recorded", directory.name)
    ```
    """
