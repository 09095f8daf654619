"""An environment of verifiers as a user writes it: one task class, a tool server, a conversation, a harness."""

import contextlib
import json
from typing import Any

import httpx
import mcp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire


class WordData(vf.TaskData):
    word: str = ""


class Dictionary(vf.Toolset[vf.ToolsetConfig, vf.State]):
    TOOL_PREFIX = None

    @vf.tool
    async def spell(self, word: str) -> str:
        """Spell a word."""
        return "-".join(word)


class WordConfig(vf.TaskConfig):
    tools: bool = False
    fails: str = ""
    rewarded: bool = True


class WordTask(vf.Task[WordData, vf.State, WordConfig]):
    @classmethod
    def toolsets(cls, config: WordConfig) -> list[vf.Toolset]:
        return [Dictionary(vf.ToolsetConfig())] if config.tools else []

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        if self.config.fails == "setup":
            raise ValueError("no such level")

    def hooks(self, attr: str) -> list[Any]:
        return super().hooks(attr) if self.config.rewarded or attr != "reward" else []

    @vf.reward(weight=2.0)
    async def says(self, trace: vf.Trace) -> float:
        if self.config.fails == "reward":
            raise ValueError("no such level")
        return float(self.data.word in trace.last_reply)

    @vf.reward(weight=0.25)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))

    @vf.metric
    async def spelled(self, trace: vf.Trace) -> float:
        return float(any("-".join(self.data.word) in str(each.content) for each in trace.tool_messages))


class WordsConfig(vf.TasksetConfig):
    task: WordConfig = WordConfig()
    words: tuple[str, ...] = ("elm", "oak", "fir")


class Words(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> list[WordTask]:
        return [WordTask(WordData(prompt=f"Say {each}.", word=each), self.config.task) for each in self.config.words]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """A chat loop with tools. It runs in the process of the environment, which verifiers permits."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_MCP = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        _, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = (
            [{"role": "user", "content": prompt}]
            if isinstance(prompt, str)
            else [message_to_wire(each) for each in prompt or []]
        )
        async with contextlib.AsyncExitStack() as stack:
            http = await stack.enter_async_context(httpx.AsyncClient(timeout=60))
            clients = [await stack.enter_async_context(mcp.Client(url)) for url in mcp_urls.values()]
            owners = {each.name: client for client in clients for each in (await client.list_tools()).tools}
            listed = [each for client in clients for each in (await client.list_tools()).tools]
            tools = [
                {
                    "type": "function",
                    "function": {"name": each.name, "description": each.description, "parameters": each.input_schema},
                }
                for each in listed
            ]
            while True:
                body = {"model": ctx.model, "messages": messages} | ({"tools": tools} if tools else {})
                headers = {"Authorization": f"Bearer {secret}"}
                reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
                if reply.status_code != 200:
                    return vf.ProgramResult(1, "", reply.text)
                message = reply.json()["choices"][0]["message"]
                messages.append({key: value for key, value in message.items() if value is not None})
                if not (calls := message.get("tool_calls")):
                    return vf.ProgramResult(0, "", "")
                for call in calls:
                    function = call["function"]
                    result = await owners[function["name"]].call_tool(
                        function["name"], json.loads(function["arguments"])
                    )
                    text = "".join(part.text for part in result.content)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


__all__ = ["ChatHarness", "Words"]

if __name__ == "__main__":
    Dictionary.run()
