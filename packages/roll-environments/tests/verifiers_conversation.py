"""An environment of verifiers with several turns: it asks again until the word is said."""

import verifiers.v1 as vf


class ConversationConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig(
        client=vf.EvalClientConfig(base_url="http://127.0.0.1:9/v1"), runtime=vf.SubprocessConfig()
    )
    asked: int = 2
    runs: int = 1


class Conversation(vf.Env[ConversationConfig]):
    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        for _ in range(self.config.runs):
            async with agents.agent.interaction(task) as chat:
                await chat.turn()
                for _ in range(self.config.asked - 1):
                    await chat.turn("Once more.")


__all__ = ["Conversation"]
