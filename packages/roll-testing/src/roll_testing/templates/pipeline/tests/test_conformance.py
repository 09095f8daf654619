"""The conformance tests of pipelines: runs of a model of one layer, and a resumed run."""

from roll_testing import PipelineConformance


class TestAcmePipeline(PipelineConformance):
    """`acme` on prompts of digits."""

    name = "acme"

    def run_config(self, runs):
        """ROLL's small config of rlvr has the same roles."""
        return runs.rlvr(eval_steps=2, validation={"data_args": {"file_name": str(runs.folder / "val.jsonl")}})
