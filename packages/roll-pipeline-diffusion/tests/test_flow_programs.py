import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_core.errors import ContractError, DataError, NonFiniteError, UnsupportedError
from roll_pipeline_diffusion.algorithm_config import BoundFunction
from roll_pipeline_diffusion.programs import FlowSetup, SamplingProgram, VelocityProgram, noise, random_sigmas, uniform
from roll_pipeline_diffusion.schedules import SigmaSchedule
from shared_tests.flow_double import SHAPE, ModuleDouble, TinyFlowNet, flow_batch, flow_setup, flow_tensors

CPU = torch.device("cpu")
MODULE = ModuleDouble(TinyFlowNet(0), base=TinyFlowNet(1), average=TinyFlowNet(2))
TENSORS = flow_tensors(5)


def test_without_a_window_the_program_is_an_euler_loop():
    net = MODULE.net
    expected = noise(flow_batch(TENSORS), "initial", SHAPE, CPU)
    with torch.no_grad():
        for sigma in (1.0, 0.75, 0.5, 0.25):
            expected = expected - 0.25 * net(expected, torch.full((5,), sigma), TENSORS["cond.prompt"])

    found = SamplingProgram(setup=flow_setup())(MODULE, flow_batch(TENSORS))

    assert set(found) == {"latents"}
    torch.testing.assert_close(found["latents"], expected)


@settings(max_examples=20)
@given(order=st.permutations(range(5)), cut=st.integers(1, 4))
def test_samples_depend_on_the_rows_seed_and_not_on_its_batch(order, cut):
    program = SamplingProgram(setup=flow_setup(), window=(0, 2), keep_velocities=True)
    whole = program(MODULE, flow_batch(TENSORS))

    for rows in (order[:cut], order[cut:]):
        for name, each in program(MODULE, flow_batch(TENSORS, rows)).items():
            torch.testing.assert_close(each, whole[name][rows], rtol=1e-5, atol=1e-5)


def test_only_steps_of_the_window_have_noise_and_are_kept():
    setup = flow_setup()
    found = SamplingProgram(setup=setup, window=(1, 2), keep_velocities=True)(MODULE, flow_batch(TENSORS))

    assert found["step_index"].tolist() == [[1, 2]] * 5
    for name in ("step_latents", "step_next_latents", "old_velocities"):
        assert found[name].shape == (5, 2, *SHAPE)
    torch.testing.assert_close(found["step_latents"][:, 1], found["step_next_latents"][:, 0])
    for at, index in enumerate((1, 2)):
        latents, velocity = found["step_latents"][:, at], found["old_velocities"][:, at]
        step = setup.step(torch.full((5,), index), latents)
        transition = setup.transition(latents, velocity, step)
        eps = noise(flow_batch(TENSORS), "step", SHAPE, CPU, index)
        torch.testing.assert_close(found["step_next_latents"][:, at], transition.mean + transition.std * eps)
        expected = transition.logprob(found["step_next_latents"][:, at], "mean")
        torch.testing.assert_close(found["old_logprobs"][:, at], expected)


def test_a_teacher_computes_velocities_at_stored_steps():
    trajectory = SamplingProgram(setup=flow_setup(), window=(0, 2), keep_velocities=True)(MODULE, flow_batch(TENSORS))
    batch = flow_batch({**TENSORS, **trajectory})

    found = VelocityProgram(setup=flow_setup())(MODULE, batch)["teacher_velocities"]
    other = VelocityProgram(setup=flow_setup(), name="v")(ModuleDouble(TinyFlowNet(9)), batch)["v"]

    torch.testing.assert_close(found, trajectory["old_velocities"])
    assert not torch.allclose(other, found)


def test_the_moving_average_or_the_base_model_may_sample():
    found = {
        weights: SamplingProgram(setup=flow_setup(), weights=weights)(MODULE, flow_batch(TENSORS))["latents"]
        for weights in ("average", "base")
    }

    for weights, seed in (("average", 2), ("base", 1)):
        plain = SamplingProgram(setup=flow_setup())(ModuleDouble(TinyFlowNet(seed)), flow_batch(TENSORS))
        torch.testing.assert_close(found[weights], plain["latents"])
    with pytest.raises(UnsupportedError):
        SamplingProgram(setup=flow_setup(), weights="average")(ModuleDouble(TinyFlowNet()), flow_batch(TENSORS))


def test_guidance_extrapolates_from_the_unconditional_velocity():
    latents, sigma = noise(flow_batch(TENSORS), "initial", SHAPE, CPU), torch.full((5,), 0.5)
    conditional = MODULE.net(latents, sigma, TENSORS["cond.prompt"])
    unconditional = MODULE.net(latents, sigma, TENSORS["uncond.prompt"])

    found = flow_setup(guidance_scale=3.0).velocity(MODULE, latents, sigma, flow_batch(TENSORS))

    torch.testing.assert_close(found, unconditional + 3 * (conditional - unconditional))


def test_guidance_without_unconditional_conditioning_is_refused():
    tensors = {name: each for name, each in TENSORS.items() if not name.startswith("uncond.")}

    with pytest.raises(DataError, match=r"uncond\."):
        SamplingProgram(setup=flow_setup(guidance_scale=2.0))(MODULE, flow_batch(tensors))


def test_non_finite_latents_name_the_first_step_and_its_rows():
    class Spoilt(TinyFlowNet):
        def forward(self, latents, sigma, prompt):
            found = super().forward(latents, sigma, prompt)
            return torch.where((sigma == 0.5)[:, None, None, None] & (prompt[:, :1, None, None] > 50), torch.nan, found)

    tensors = {**TENSORS, "cond.prompt": TENSORS["cond.prompt"].clone()}
    tensors["cond.prompt"][3] = 100.0

    with pytest.raises(NonFiniteError, match=r"step 2 of 4.*row3") as caught:
        SamplingProgram(setup=flow_setup())(ModuleDouble(Spoilt()), flow_batch(tensors))

    assert "row2" not in str(caught.value)


def test_a_model_with_velocities_of_another_shape_is_refused():
    with pytest.raises(ContractError):
        SamplingProgram(setup=flow_setup())(ModuleDouble(lambda x, sigma, prompt: x[:, :1]), flow_batch(TENSORS))


def test_a_sampler_of_the_user_is_imported_and_checked(tmp_path, monkeypatch):
    (tmp_path / "flow_sampler_a.py").write_text(
        "from roll_pipeline_diffusion.samplers import Transition\n"
        "def noisy(latents, velocity, step, *, scale=1.0):\n"
        "    return Transition(mean=latents, std=step.sigma * scale)\n"
        "def wrong(latents, velocity, step): return latents\n"
    )
    monkeypatch.chdir(tmp_path)

    def setup(name, **options):
        return FlowSetup(
            schedule=SigmaSchedule(num_steps=2),
            latent_shape=SHAPE,
            sampler=BoundFunction(target=f"flow_sampler_a:{name}", options=options),
        )

    found = SamplingProgram(setup=setup("noisy", scale=0.0), window=(0,))(MODULE, flow_batch(TENSORS))
    torch.testing.assert_close(found["step_next_latents"], found["step_latents"])
    with pytest.raises(ContractError, match="flow_sampler_a:wrong"):
        SamplingProgram(setup=setup("wrong"), window=(0,))(MODULE, flow_batch(TENSORS))


def test_random_numbers_differ_by_row_purpose_and_step():
    batch = flow_batch(TENSORS)
    values = torch.stack(
        [
            noise(batch, "initial", (50,), CPU),
            noise(batch, "step", (50,), CPU, 0),
            noise(batch, "step", (50,), CPU, 1),
            noise(batch, "training", (50,), CPU),
        ]
    ).flatten(0, 1)

    correlations = torch.corrcoef(values) - torch.eye(len(values))
    assert correlations.abs().max() < 0.6
    torch.testing.assert_close(noise(batch, "initial", (50,), CPU), values[:5])


def test_every_epoch_has_random_numbers_of_its_own():
    first, second = (replace(flow_batch(TENSORS), epoch=epoch) for epoch in (0, 1))

    for purpose in ("initial", "training"):
        assert not torch.isclose(noise(first, purpose, SHAPE, CPU), noise(second, purpose, SHAPE, CPU)).any()
        torch.testing.assert_close(noise(second, purpose, SHAPE, CPU), noise(second, purpose, SHAPE, CPU))
    assert not torch.isclose(uniform(first, "time", CPU), uniform(second, "time", CPU)).any()


def test_random_numbers_have_their_distributions():
    batch = flow_batch({"seed": torch.arange(4000) - 2000})
    given_ = {"mean": 0.5, "std": 0.8}

    assert uniform(batch, "dropout", CPU).mean() == pytest.approx(0.5, abs=0.02)
    even = random_sigmas(batch, CPU, distribution="uniform", **given_)
    assert (even.min() > 0, even.max() < 1, even.var().item()) == (True, True, pytest.approx(1 / 12, abs=4e-3))
    logits = torch.logit(random_sigmas(batch, CPU, distribution="logit_normal", **given_).double())
    assert (logits.mean().item(), logits.std().item()) == (pytest.approx(0.5, abs=0.05), pytest.approx(0.8, abs=0.03))


def test_programs_are_picklable():
    program = SamplingProgram(setup=flow_setup(), window=(0, 1))

    assert pickle.loads(pickle.dumps(program)) == program


def test_a_missing_seed_is_named():
    with pytest.raises(DataError, match="seed"):
        SamplingProgram(setup=flow_setup())(MODULE, flow_batch({"cond.prompt": torch.zeros(2, 3)}))
