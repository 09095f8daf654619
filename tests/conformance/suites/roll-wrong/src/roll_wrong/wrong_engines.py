"""Engines with one mistake each. The first line of each class says which."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import torch

from roll_core.errors import ModelError
from roll_core.spec.weights import digest, make_receipt
from roll_core.types import Completion, TopTokens, WeightReceipt
from roll_wrong.engine import RightEngine, log_softmax

# -- logprobs


class LogprobsOffByOne(RightEngine):
    """Reports each token's logprob with the one after it."""

    def finished(self, output, aborted):
        found = super().finished(output, aborted)
        return replace(found, logprobs=np.roll(found.logprobs, 1))


class LogprobsUntempered(RightEngine):
    """Reports logprobs at temperature 1, as several engines do."""

    def scored(self, row_V, shaped_V, params):
        return log_softmax(row_V)


class LogprobsPenalised(RightEngine):
    """Reports logprobs after the repetition penalty."""

    def scored(self, row_V, shaped_V, params):
        return super().scored(shaped_V, shaped_V, params)


class LogprobsOfTheKept(RightEngine):
    """Reports logprobs of what top-k, top-p and min-p have left."""

    def scored(self, row_V, shaped_V, params):
        all_V = super().scored(row_V, shaped_V, params)
        if params.temperature == 0:
            return all_V
        order, kept = self.cut(np.exp(all_V), params)
        found = np.full_like(all_V, -np.inf)
        found[order] = np.log(np.maximum(kept / kept.sum(), 1e-300))
        return found


class PromptLogprobsTempered(RightEngine):
    """Divides the prompt's logits by the temperature, too."""

    def prompt_logprobs_at(self, request):
        return lambda row_V: log_softmax(row_V / request.params.temperature)


class LateTopTokens(RightEngine):
    """Reports the most likely tokens of a prompt one position late."""

    def top_tokens(self, request):
        found = super().top_tokens(request)
        return TopTokens(ids=np.roll(found.ids, 1, axis=0), logprobs=np.roll(found.logprobs, 1, axis=0))


class GreedyLogprobsZero(RightEngine):
    """Reports logprobs of greedy tokens at temperature 0."""

    def scored(self, row_V, shaped_V, params):
        if params.temperature == 0:
            return np.zeros_like(row_V)
        return super().scored(row_V, shaped_V, params)


class NoisyLogprobs(RightEngine):
    """Computes the same a little differently every time."""

    def scored(self, row_V, shaped_V, params):
        self.times = getattr(self, "times", 0) + 1
        return super().scored(row_V, shaped_V, params) - 1e-6 * (self.times % 7)


class FinerLogprobs(RightEngine):
    """Reports logprobs in the precision in which it computed them."""

    def finished(self, output, aborted):
        return replace(super().finished(output, aborted), logprobs=np.array(output.logprobs))


class BiasLostInBf16(RightEngine):
    """Leaves a tensor out where it computes in bf16."""

    def loaded(self, name, tensor, dtype):
        found = super().loaded(name, tensor, dtype)
        return torch.zeros_like(found) if (name, dtype) == ("bias", "bf16") else found


# -- sampling


class GreedyTakesTheFirst(RightEngine):
    """Takes the first of the tokens that are nearly the most likely."""

    def most_likely(self, row_V):
        return int(np.flatnonzero(row_V > row_V.max() - 0.5)[0])


class CutsByDefault(RightEngine):
    """Has a top-p of its own where none is asked for, as some models' files say."""

    def cut(self, probs_V, params):
        asked = params.top_k or params.min_p or params.top_p < 1
        return super().cut(probs_V, params if asked else replace(params, top_p=0.9))


class TopKOneMore(RightEngine):
    """Keeps one token more than top-k says."""

    def top_k(self, params):
        return params.top_k + 1


class TemperatureForgotten(RightEngine):
    """Draws at temperature 1 and reports logprobs as if it did not."""

    def draw(self, row_V, params, output):
        return super().draw(row_V, replace(params, temperature=1.0), output)


class TopPOneLess(RightEngine):
    """Leaves out the token with which the sum reaches top-p."""

    def top_p(self, kept, top_p):
        within = np.cumsum(kept) <= top_p * kept.sum()
        within[0] = True
        return np.where(within, kept, 0) if top_p < 1 else kept


class TopPOneMore(RightEngine):
    """Keeps one token more than top-p needs."""

    def top_p(self, kept, top_p):
        number = int((super().top_p(kept, top_p) > 0).sum()) + 1
        return np.where(np.arange(len(kept)) < number, kept, 0)


class MinPIgnored(RightEngine):
    """Takes min_p and does nothing with it."""

    def min_p(self, params):
        return 0.0


class PenaltySparesPrompts(RightEngine):
    """Punishes repetitions of the response only."""

    def seen(self, request, output):
        return set(output.tokens)


class SeedOfTheBatch(RightEngine):
    """Mixes into the seed how many requests run."""

    def random(self, request, arrival, index):
        seed = request.params.seed
        if seed is None:
            return super().random(request, arrival, index)
        return np.random.default_rng((seed, index, len(self.running)))


class SeedsInARow(RightEngine):
    """Gives output i the seed plus i."""

    def random(self, request, arrival, index):
        seed = request.params.seed
        return super().random(request, arrival, index) if seed is None else np.random.default_rng(seed + index)


class UndeclaredSeeds(RightEngine):
    """Accepts seeds, but declares none."""


class SameWithoutSeed(RightEngine):
    """Has one seed for all requests that bring none."""

    def random(self, request, arrival, index):
        return super().random(request, 0, index)


class LosesTrackOfMany(RightEngine):
    """Looks a token up in the wrong place where more than 40 requests run."""

    def advance(self, request, output, row_V):
        super().advance(request, output, self.row(0) if len(self.running) > 40 else row_V)


# -- ends


class TwoTokensAtLeast(RightEngine):
    """Cannot draw one token only."""

    def most_tokens(self, params):
        return max(2, params.max_new_tokens)


class StopStringCut(RightEngine):
    """Removes the stop string's tokens from the response."""

    def stopped(self, output):
        for _ in output.stop:
            for each in (output.tokens, output.logprobs, output.versions):
                each.pop()


class EndTokenDropped(RightEngine):
    """Does not return the end token."""

    def judge(self, output, token, ends, params):
        super().judge(output, token, ends, params)
        if isinstance(output.stop, int):
            for each in (output.tokens, output.logprobs, output.versions):
                each.pop()


class StopNotSaid(RightEngine):
    """Does not say what ended a response."""

    def finished(self, output, aborted):
        return replace(super().finished(output, aborted), stop=None)


class StopsInSpiteOfAll(RightEngine):
    """Stops at stop_token_ids though end tokens are to be ignored."""

    def ends(self, params):
        return super().ends(params) | set(params.stop_token_ids)


class EndsTooSoon(RightEngine):
    """Takes min_new_tokens and does nothing with it."""

    def min_new_tokens(self, params):
        return 0


class PromptCut(RightEngine):
    """Answers requests that are longer than its context."""

    def too_long(self, why):
        pass


class TakesAnyNumber(RightEngine):
    """Does not look at temperature, top_p and min_p before it takes them."""

    def check_params(self, params):
        pass


# -- weights


class StaleLongPrefixes(RightEngine):
    """Forgets over an update what it knows of short prompts only."""

    def updated(self):
        long = {key: row_V for key, row_V in self.prefixes.items() if len(key) > 8 * 100}
        self.prefixes = long


class ChangesOverlooked(RightEngine):
    """Takes an update for the same again when its first tensor is."""

    def hold(self, arrived):
        if not torch.equal(arrived["table.weight"], self.held["table.weight"]):
            super().hold(arrived)


class StalePrefixes(RightEngine):
    """Keeps what it knows of prompts over an update."""

    def updated(self):
        pass


class BiasForgotten(RightEngine):
    """Leaves one tensor as it was, and digests what was sent."""

    def hold(self, arrived):
        self.held = {**self.held, "table.weight": arrived["table.weight"]}

    def receipt(self, manifest, arrived):
        return make_receipt(manifest, arrived.items())


class DigestsOfOneKind(RightEngine):
    """Digests with XXH3, whatever the manifest names."""

    def receipt(self, manifest, arrived):
        return WeightReceipt(version=self.version, digests={name: digest(each) for name, each in self.held.items()})


class ReceiptOfTheSent(RightEngine):
    """Digests tensors as they come, before it converts them."""

    def taken(self, tensor, name, shared):
        self.digests = {**getattr(self, "digests", {}), name: digest(tensor)}
        return super().taken(tensor, name, shared)

    def receipt(self, manifest, arrived):
        return WeightReceipt(version=self.version, digests=self.digests)


class ReceiptOfTheManifest(RightEngine):
    """Says that it holds what it was told that it would."""

    def receipt(self, manifest, arrived):
        return WeightReceipt(version=self.version, digests={each.name: each.digest for each in manifest.tensors})


class BorrowsForGood(RightEngine):
    """Keeps the sender's memory instead of a copy."""

    def taken(self, tensor, name, shared):
        return tensor if tensor.dtype == torch.float32 else tensor.float()


class WritesIntoShared(RightEngine):
    """Copies an update into the memory that it holds, though that is the trainer's."""

    def taken(self, tensor, name, shared):
        return super().taken(tensor, name, shared) if shared else self.held[name].copy_(tensor)


class MissingIgnored(RightEngine):
    """Goes on with the old tensor where none came."""

    def missing(self, names):
        pass


class UnexpectedIgnored(RightEngine):
    """Overlooks tensors that it does not know."""

    def unexpected(self, name):
        pass


class DrawsWithAHalf(RightEngine):
    """Goes on drawing after an update that broke off."""

    def waits(self):
        return False


class VersionOfTheEnd(RightEngine):
    """Marks all tokens with the version under which the last one was drawn."""

    def finished(self, output, aborted):
        found = super().finished(output, aborted)
        return replace(found, versions=np.full_like(found.versions, self.version))


class VersionBehind(RightEngine):
    """Marks tokens with the version before."""

    def finished(self, output, aborted):
        found = super().finished(output, aborted)
        return replace(found, versions=np.maximum(found.versions - 1, 0))


# -- life


class AbortForgets(RightEngine):
    """Throws away what an aborted request has drawn."""

    async def abort(self, ids):
        for each in ids:
            for output in self.running[each].outputs if each in self.running else ():
                output.tokens, output.logprobs, output.versions = [], [], []
        return await super().abort(ids)


class AbortSaysNothing(RightEngine):
    """Lets generate return what was drawn, and abort nothing."""

    async def abort(self, ids):
        await super().abort(ids)
        return []


class AbortKnowsAll(RightEngine):
    """Raises for ids that do not run."""

    async def abort(self, ids):
        for each in ids:
            if each not in self.running:
                raise KeyError(each)
        return await super().abort(ids)


class TellsNoEnds(RightEngine):
    """Tells of outputs that have ended as of those that go on."""

    def told(self, output):
        return replace(super().told(output), finish_reason="abort", stop=None)


class TellsTheVersionOfNow(RightEngine):
    """Tells of all tokens as if the weights of now had drawn them."""

    def told(self, output):
        found = super().told(output)
        return replace(found, versions=np.full_like(found.versions, self.version))


class TellsNothingNew(RightEngine):
    """Tells for good what a request had drawn when it was asked first."""

    first = None

    async def progress(self):
        now = await super().progress()
        self.first = {each.id: each for each in now} | (self.first or {})
        return [self.first[each.id] for each in now]


class BufferLostAsleep(RightEngine):
    """Loses in a sleep what no update brings back."""

    async def sleep(self):
        await super().sleep()
        self.factor = 0.0


class SharedKeptAsleep(RightEngine):
    """Remembers what it held before it went to sleep."""

    async def sleep(self):
        self.before = self.held
        await super().sleep()


class AnswersAfterStop(RightEngine):
    """Goes on as if nothing had happened."""

    over = False

    async def stop(self):
        self.over = True
        running, self.running = self.running, None
        await super().stop()
        self.running = None if running is None else {}

    def alive(self):
        if not self.over:
            super().alive()


class AbortEndsAll(RightEngine):
    """Ends whatever runs when one request is aborted."""

    async def abort(self, ids):
        for each in self.running.values():
            each.aborted = True
        return await super().abort(ids)


class CancelEndsAll(RightEngine):
    """Ends whatever runs when one call is cancelled."""

    def cancelled(self):
        for each in self.running.values():
            each.aborted = True


class DrawsForNobody(RightEngine):
    """Goes on with a request whose call is cancelled."""

    async def generate(self, request):
        return await asyncio.shield(asyncio.ensure_future(super().generate(request)))


class AnswersBeforeStart(RightEngine):
    """Answers with nothing where there is no model."""

    async def generate(self, request):
        if not hasattr(self, "held"):
            return Completion(id=request.id, outputs=())
        return await super().generate(request)


class OutlivesItsProcess(RightEngine):
    """Does not notice that the process is dead that computes for it."""

    def alive(self):
        pass


class CutsShortWithoutRoom(RightEngine):
    """Ends a request for which there is no room."""

    async def room(self, running, tokens):
        limit = self.config.cache_tokens
        running.aborted = bool(limit) and self.reserved + tokens > limit


class NameOfNobody(RightEngine):
    """Gives a URL where nothing listens."""

    def endpoint(self):
        return "http://127.0.0.1:9/v1"


class UncountedMetrics(RightEngine):
    """Divides by the number of steps, which may be none."""

    def metrics(self):
        return {"running/mean": float("nan")}


class NamelessModel(RightEngine):
    """Does not say which model is not there."""

    def no_model(self, path, error):
        return ModelError("the model cannot be loaded")


class SilentPromptLogprobs(RightEngine):
    """Overlooks a wish that it cannot fulfil."""

    async def generate(self, request):
        return await super().generate(replace(request, prompt_logprobs=False))


class SilentRoutedExperts(RightEngine):
    """Overlooks that experts are asked for."""

    def no_experts(self, request):
        return None
