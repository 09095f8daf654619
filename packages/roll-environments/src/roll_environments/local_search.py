"""`local_search`: questions about a corpus. The tool `search` ranks its documents by BM25."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from typing_extensions import override

from roll_core.spec.environment import Environment, Opening, Turn
from roll_environments.tool_calls import ToolCallError, correction, tool_calls, tool_schema, tool_turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from roll_core.spec.environment import Message, Reply, Task
    from roll_environments.tool_calls import ToolCall

WORD = re.compile(r"\w+")
TOOL = tool_schema(
    "search", "Search the corpus. Returns the documents that fit best.", {"query": "Words of the document."}
)

QUESTIONS = {
    "town": "In which town was the maker of {} born?",
    "year": "In which year was the maker of {} born?",
    "teacher": "Who taught the maker of {}?",
}
"""Questions about the corpus of this package, by the key of the answer."""


class LocalSearch(Environment):
    """One question. A reply without a tool call ends the episode; its text after the last "Answer:" is the answer.

    The reward is 1 if the answer is right without regard to case, punctuation and articles, otherwise 0. Questions
    about the corpus of this package need two searches. With a corpus of your own, tasks have `question` and `answer`.
    """

    reports_success: ClassVar[bool] = True

    def __init__(self, *, corpus: str | None = None, num_results: int = 3) -> None:
        self.corpus, self.num_results = corpus, num_results

    @override
    async def reset(self, task: Task, seed: int) -> Opening:
        self.index = _index(self.corpus)
        self.queries: list[str] = []
        if "question" in task:
            question, self.answers = str(task["question"]), _texts(task["answer"])
        elif self.corpus is None:
            question, self.answers, self.queries = make_question(random.Random(seed), self.index.documents)
        else:
            raise ValueError("the task has no question: with corpus, set data_args to rows with question and answer")
        text = f'{question}\nUse the tool search. Then reply with "Answer:" and the answer.'
        return Opening(messages=[{"role": "user", "content": text}], tools=[TOOL])

    @override
    async def step(self, reply: Reply) -> Turn:
        if calls := list(tool_calls(reply)):
            return tool_turn(reply, [self._search(call) for call in calls], reward=0.0)
        if wrong := correction(reply, reward=0.0):
            return wrong
        answer = normalised(reply.text.rpartition("Answer:")[2])
        right = float(any(answer == normalised(expected) for expected in self.answers))
        return Turn(reward=right, done=True, metrics={"success": right})

    def _search(self, call: ToolCall) -> tuple[Message, float]:
        """The result of a call, and 1 if it failed."""
        try:
            if call.name != "search":
                raise ToolCallError(f"there is no tool {call.name}; the tool is search")
            query = call.arguments.get("query")
            if not isinstance(query, str):
                raise ToolCallError("the argument query is missing, or no text")
        except ToolCallError as error:
            return call.error(error), 1.0
        documents = self.index.search(query, self.num_results)
        return call.result(
            "\n".join(f"{document['title']}: {document['text']}" for document in documents) or "no document"
        ), 0.0

    def oracle(self) -> list[Any]:
        """Replies with calls, as their arguments, then the answer."""
        return [*({"query": query} for query in self.queries), f"Answer: {self.answers[0]}"]


class Bm25:
    """Ranks documents by BM25 (Robertson and Zaragoza 2009), with the idf of Lucene.

        score(d, q) = Σ_{t in q} idf(t) · f(t,d) (k1 + 1) / (f(t,d) + k1 (1 - b + b |d| / mean |d|))
        idf(t)      = ln(1 + (N - n(t) + 0.5) / (n(t) + 0.5))

    f(t,d) is the number of times the term is in the document, n(t) the number of documents that have it. `rank_bm25`
    has no 1 in idf, which is then negative for terms in more than half of the documents.
    """

    def __init__(self, documents: Sequence[dict[str, Any]], *, k1: float = 1.5, b: float = 0.75) -> None:
        self.documents, self.k1, self.b = documents, k1, b
        self.counts = [Counter(terms(f"{document['title']} {document['text']}")) for document in documents]
        self.lengths = [sum(counts.values()) for counts in self.counts]
        self.mean = sum(self.lengths) / max(len(documents), 1)
        having = Counter(term for counts in self.counts for term in counts)
        self.idf = {term: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for term, n in having.items()}

    def scores(self, query: str) -> list[float]:
        """Score of each document."""
        words = [term for term in terms(query) if term in self.idf]
        scores = []
        for counts, length in zip(self.counts, self.lengths, strict=True):
            norm = self.k1 * (1 - self.b + self.b * length / self.mean)
            scores.append(sum(self.idf[t] * counts[t] * (self.k1 + 1) / (counts[t] + norm) for t in words))
        return scores

    def search(self, query: str, number: int) -> list[dict[str, Any]]:
        """Documents with the highest scores above 0. Equal scores keep the order of the corpus."""
        scores = self.scores(query[:1000])
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[:number]
        return [self.documents[index] for index in best if scores[index] > 0]


def terms(text: str) -> list[str]:
    """Words in lower case."""
    return WORD.findall(text.lower())


def normalised(text: str) -> str:
    """Words in lower case without articles, for the comparison of answers. A text of articles keeps them: option A."""
    words = terms(text)
    return " ".join([word for word in words if word not in ("a", "an", "the")] or words)


def read_corpus(path: str | None) -> list[dict[str, Any]]:
    """Documents of a JSON Lines file, or those of this package. Raises `ValueError`."""
    file = resources.files("roll_environments") / "corpus.jsonl" if path is None else Path(path)
    try:
        documents = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    for number, document in enumerate(documents, 1):
        if not isinstance(document, dict) or not all(isinstance(document.get(key), str) for key in ("title", "text")):
            raise ValueError(f"{path}, document {number} has no title and text, expected two strings")
    if not documents:
        raise ValueError(f"{path} has no documents")
    return documents


@lru_cache(maxsize=4)
def _index(corpus: str | None) -> Bm25:
    return Bm25(read_corpus(corpus))


def make_question(
    generator: random.Random, documents: Sequence[dict[str, Any]]
) -> tuple[str, tuple[str, ...], list[str]]:
    """A question about two documents of this package's corpus, its answer, and queries that find both."""
    people = {document["title"]: document for document in documents if document["kind"] == "person"}
    work = generator.choice([document for document in documents if document["kind"] == "work"])
    person = people[work["by"]]
    key, question = generator.choice(list(QUESTIONS.items()))
    return question.format(work["title"]), (person[key],), [work["title"], person["title"]]


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)
