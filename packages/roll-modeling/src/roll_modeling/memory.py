"""Memory formulas for strategies that wrap a Hugging Face model: weights, activations, logits, gradients.

Arithmetic on sizes, derived in docs/plan.md. Light: imports no torch. Each strategy adds its own formulas for sharding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal, get_args

from roll_core.spec.plan import DTYPE_BYTES, LATER, MemoryEstimate, MemoryItem, MemorySaving

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from roll_core.spec.model import LayerSize
    from roll_core.spec.plan import Activity, Memory, MemoryInput

Moment = Literal["head", "first layer", "last layer", "embedding", "end"]
"""Points in time of a backward pass, in order.

The pass begins at the output layer (`head`), goes through the layers from the model's last one to its first, and
reaches the embedding. At the `end` all activations are freed, and gradients are being summed over ranks. Memory use
grows or shrinks in between.
"""
MOMENTS: tuple[Moment, ...] = get_args(Moment)

HOST_CHUNK_ELEMENTS = 1 << 27
"""Logits of one chunk on the host: 512 MiB, 832 tokens of a vocabulary of 152,000.

Adding a chunk's product to the output layer's gradient takes as long as the products of 60 (float32) to 85 (bfloat16)
tokens, so that many small chunks are slower than plain torch (`benchmarks/head_chunks.py`).
"""
HOST_MIN_ADDED = 192
"""Minimum tokens of a float32 chunk for which oneDNN computes the output layer's gradient, which is then added.

Smaller chunks use MKL's accumulating product, which is slower but needs no separate addition.
"""
DEVICE_CHUNK_ELEMENTS = 1 << 28
"""Logits of one chunk on an accelerator: 3 GiB with log-softmax and gradient; 1,728 tokens of a vocabulary of 152,000.

Derived, not measured. Adding a chunk's product to the output layer's gradient moves 12 bytes per weight. On an H200
(4.8 TB/s, 800 TFLOP/s) this takes as long as the chunk's four products of 250 tokens.
"""
KEPT_ELEMENTS = 1 << 28
"""Maximum log-softmax values kept for the backward pass, 1 GiB; others are recomputed, which is a fourth product."""
KEPT_CHUNKS = 4
"""Maximum chunks kept if `logprob_chunk_tokens` is given. It thus limits all memory of the head."""
LONGEST_BLOCKED, BLOCK = 512, 64
"""Same values as in `roll_kernels.blocked_attention`."""
MODEL_CODE_BYTES = 43 << 20
"""Host memory that importing a model's code takes in a worker with its strategy loaded (transformers 5.23)."""
MOMENT_BYTES = 8
"""Bytes per parameter of AdamW's two float32 moments."""
MASTER_BYTES = 4
FEWER_SEQUENCES = "fewer sequences are decoded together"
"""Cost of a smaller cache."""


def head_chunk(vocab_size: int, *, on_host: bool) -> int:
    """Default number of tokens whose logits exist at once."""
    tokens = (HOST_CHUNK_ELEMENTS if on_host else DEVICE_CHUNK_ELEMENTS) // vocab_size
    return max(64, tokens // 64 * 64)  # products prefer multiples of 64


def kept_tokens(vocab_size: int, chunk_tokens: int | None) -> int:
    """Maximum number of tokens whose log-softmax is kept for the backward pass; `chunk_tokens` is the config's."""
    return KEPT_CHUNKS * chunk_tokens if chunk_tokens else KEPT_ELEMENTS // vocab_size


def padded_rows(num_rows: int) -> int:
    """Padded number of rows of a product on the host: less than an eighth more than `num_rows`, and at most 7 rows or a
    sixteenth.

    Padding limits the number of distinct row counts, to 40 up to 128 rows. For each pair of a row count and a weight
    shape, oneDNN keeps about 0.6 MB and takes milliseconds.
    """
    bits = num_rows.bit_length()
    step = 1 << max(0, min(3, bits - 4), bits - 5)
    return -(-num_rows // step) * step


def millions(count: int) -> str:
    """Format a count in millions, for example `494.0 M`."""
    return f"{count / 1e6:.1f} M"


def weight_use(question: MemoryInput, size: int, shards: int = 1, *, on: Memory = "device") -> MemoryItem:
    """The model and its adapters on each of `shards` ranks, at `size` bytes per parameter.

    Parameters in 4 bits have a float32 scale per block of 64, of which each rank holds all.
    """
    packed = question.quantized_parameters
    count = question.model.parameters + question.added_parameters - packed
    num_bytes = (size * count + packed // 2) // shards + packed // 16
    formula = f"{size} × {millions(count)}" + f" + {millions(packed)} / 2" * bool(packed)
    formula = f"({formula}) / {shards}" if shards > 1 else formula
    formula += f" + scales of {millions(packed)} / 16" * bool(packed)
    return MemoryItem(what="weights", num_bytes=num_bytes, formula=formula, on=on, offloads=True)


def optimizer_uses(
    question: MemoryInput,
    shards: int = 1,
    *,
    has_masters: bool,
    during: tuple[Activity, ...] = LATER,
    on: Memory = "device",
) -> Iterator[MemoryItem]:
    """AdamW's state of the trained parameters, divided over `shards` ranks; its moments exist `during` activities."""
    moments = MemoryItem.of("optimizer", MOMENT_BYTES, question.trained_parameters, shards, "moments", during=during)
    yield replace(moments, on=on, offloads=True)
    for note, exists in (("float32 masters", has_masters), ("moving average", question.averages)):
        if exists:
            state = MemoryItem.of("optimizer", MASTER_BYTES, question.trained_parameters, shards, note)
            yield replace(state, on=on, offloads=True)


def model_code() -> MemoryItem:
    """Host memory of transformers' code, for a strategy that wraps its models."""
    return MemoryItem(
        what="libraries", num_bytes=MODEL_CODE_BYTES, formula="transformers' code of the model", on="host"
    )


def start_uses(question: MemoryInput) -> tuple[MemoryItem, ...]:
    """Host memory of weights while they are initialised in float32, or read, before they are cast or moved."""
    size = 4 if question.random_weights else DTYPE_BYTES[question.dtype]
    if question.on_host and size == DTYPE_BYTES[question.dtype] and not question.quantized_parameters:
        return ()
    note = "sampled or read before they are cast, quantized or moved"
    return (MemoryItem.of("weights", size, question.model.parameters, note=note, during=("start",), on="host"),)


def engine_estimate(
    question: MemoryInput,
    weights: MemoryItem,
    cache: tuple[int, str],
    *,
    sleep_level: int,
    bucket_mib: int,
    cache_size: tuple[str, float],
) -> MemoryEstimate:
    """Memory of an engine's slot: its part of the weights, its cache with its formula, and the bucket for updates.

    An engine that sleeps frees the cache, and also the weights if they are not in host memory. `cache_size` is the key
    of `strategy_config` that limits the cache, with its value: bytes, tokens, or a fraction of the memory.
    """
    sleeps, (key, size) = sleep_level > 0, cache_size
    halves = [int(size) >> 1, int(size) >> 2, int(size) >> 3]
    sizes = halves if isinstance(size, int) else [share for share in (0.7, 0.5, 0.35, 0.2) if share < size]
    received = f"bucket_mib {bucket_mib} of received weights"
    return MemoryEstimate(
        uses=(
            replace(weights, offloads=sleeps and not question.on_host),
            MemoryItem(what="kv cache", num_bytes=cache[0], formula=cache[1], offloads=sleeps),
            MemoryItem(what="buffers", num_bytes=bucket_mib << 20, formula=received, during=("receive",)),
        ),
        savings=tuple(MemorySaving(keys={key: size}, costs=FEWER_SEQUENCES) for size in sizes),
    )


def computation(
    question: MemoryInput,
    *,
    fused: bool,
    chunk_tokens: int | None,
    recomputes: bool = False,
    shards: int = 1,
    beside: Callable[[Moment], Iterable[MemoryItem]] = lambda moment: (),
) -> tuple[MemoryItem, ...]:
    """Memory that exists only while a microbatch is computed, for training and for scoring.

    `shards` ranks share the tokens of a microbatch. A head that `recomputes` keeps no log-softmax. For the backward
    pass, the result is the memory at its most expensive moment. `beside` gives a strategy's own uses at a moment: uses
    during `backward` that end with the pass.
    """
    scored = -(-question.score_tokens // max(1, question.longest))
    uses = _largest([_scoring(question, chunk_tokens, shards)], image_uses(question, scored, "score"))
    if not question.trains:
        return tuple(uses)
    model, size = question.model, DTYPE_BYTES[question.dtype]
    if question.compared is not None:
        weights = DTYPE_BYTES[question.compared.dtype], model.vocab_size * question.compared.hidden_size
        uses.append(MemoryItem.of("weights", *weights, note="output layer of the compared model", during=LATER))
    moments = [
        (*_training(question, moment, fused, chunk_tokens, recomputes, shards), *beside(moment)) for moment in MOMENTS
    ]
    largest = [use for use in max(moments, key=_total) if use.num_bytes]
    images = image_uses(question, question.train_sequences, "backward")
    uses += [*largest, *images] if question.trains_vision else _largest(largest, images)
    if _offloads(question):
        inputs = len(model.layers) * _rows(question, question.train_tokens, shards) * model.hidden_size
        note = "inputs of the layers"
        uses.append(MemoryItem.of("activations", size, inputs, note=note, during=("backward",), on="host"))
    return tuple(uses)


def _total(items: Iterable[MemoryItem]) -> int:
    return sum(item.num_bytes for item in items)


def _largest(language: list[MemoryItem], images: Sequence[MemoryItem]) -> list[MemoryItem]:
    """The pixels of `image_uses` with the encoder, or with the language model that runs after it."""
    pixels, encoder = images[:1], images[1:]
    return [*pixels, *(encoder if _total(encoder) > _total(language) else language)]


def _training(
    question: MemoryInput, moment: Moment, fused: bool, chunk_tokens: int | None, recomputes: bool, shards: int
) -> Iterator[MemoryItem]:
    """Memory at one moment of the backward pass."""
    tokens, model, size = _rows(question, question.train_tokens, shards), question.model, DTYPE_BYTES[question.dtype]
    if moment in ("head", "first layer", "last layer"):
        num_bytes, how = _activations(question, moment, tokens, fused)
        yield MemoryItem(what="activations", num_bytes=num_bytes, formula=f"{moment}: {how}", during=("backward",))
    if moment == "head":
        num_bytes = head_bytes(question, tokens, chunk_tokens, backward=True, keeps=not recomputes)
        how = f"{moment}: {_head_formula(question, tokens, chunk_tokens, backward=True)}"
        yield MemoryItem(what="logits", num_bytes=num_bytes, formula=how, during=("backward",))
    if question.trained_parameters <= question.added_parameters or moment == "end":
        return
    head = model.vocab_size * model.hidden_size if question.task == "causal_lm" else 0
    if moment == "head" and head:  # a model without a head may have no vocabulary
        # Of several chunks it is accumulated in float32, next to the gradient of one chunk.
        tokens = _scored(question, tokens)
        chunk = chunk_tokens or head_chunk(model.vocab_size, on_host=question.on_host)
        in_place = size == 4 and chunk < HOST_MIN_ADDED
        per_weight = 4 + size if recomputes else size if chunk >= tokens else 4 if in_place else 4 + size
        yield MemoryItem.of("gradients", per_weight, head, note=f"{moment}: the output layer's", during=("backward",))
    elif moment != "head":
        # A tied output layer's gradient waits for the embedding's, which has the same size.
        count = head * model.tied + model.embedding * (moment == "embedding")
        note = f"{moment}: the embedding's, and the tied output layer's"
        yield MemoryItem.of("gradients", size, count, note=note, during=("backward",))


def _activations(question: MemoryInput, moment: Moment, tokens: int, fused: bool) -> tuple[int, str]:
    """Activations kept at this moment, and the gradients of the layer being computed; also as text."""
    model, layers = question.model, question.model.layers
    per_layer = [layer_bytes(question, layer, tokens, fused=fused) for layer in layers]
    backward = max((_backward_bytes(question, layer, tokens) for layer in layers), default=0)
    kept_per_layer = [
        min(num_bytes, _kept_bytes(question, layer, tokens)) if question.gradient_checkpointing else num_bytes
        for layer, num_bytes in zip(layers, per_layer, strict=True)
    ]
    inputs = tokens * model.hidden_size * DTYPE_BYTES[question.dtype]
    again = 0
    if question.gradient_checkpointing:
        again = max(
            (
                num_bytes - max(0, kept_bytes - inputs)
                for num_bytes, kept_bytes in zip(per_layer, kept_per_layer, strict=True)
            ),
            default=0,
        )
    count = 1 if moment == "last layer" else len(layers)
    selective = "inputs, products and attention of " if _is_selective(question) else "inputs of "
    how = f"{selective if again else ''}{count} layers, {tokens} tokens"
    if moment == "head":
        return sum(kept_per_layer), how
    more = ", one layer computed again" if again else ""
    return sum(kept_per_layer[:count]) + again + backward, f"{how}{more}, and one layer's gradients"


def _scoring(question: MemoryInput, chunk_tokens: int | None, shards: int) -> MemoryItem:
    """Memory of a scoring pass at its larger moment: in a layer, or at the output layer."""
    tokens, model, size = _rows(question, question.score_tokens, shards), question.model, DTYPE_BYTES[question.dtype]
    width = max((layer.active_width for layer in model.layers), default=0)
    live = tokens * size * (3 * model.hidden_size + max(2 * model.query_width + 2 * model.key_width, 3 * width))
    logits = head_bytes(question, tokens, chunk_tokens, backward=False, keeps=False)
    if live > logits:
        formula = f"of one layer at a time, {tokens} tokens"
        return MemoryItem(what="activations", num_bytes=live, formula=formula, during=("score",))
    formula = _head_formula(question, tokens, chunk_tokens, backward=False)
    return MemoryItem(what="logits", num_bytes=logits, formula=formula, during=("score",))


def image_uses(question: MemoryInput, sequences: int, act: Activity) -> tuple[MemoryItem, ...]:
    """Memory of the images of some sequences during `act`: pixels in float32 and cast, then the image encoder's.

    Images are encoded before the language model runs. A frozen encoder then leaves nothing, so that its memory counts
    only beyond that of the language model.
    """
    vision, size = question.model.vision, DTYPE_BYTES[question.dtype]
    if vision is None or not question.image_tokens:
        return ()
    patches = sequences * question.image_tokens * vision.patches_per_token
    # A layer's input and norm, queries, keys, values and attention, and three tensors of its feed-forward part.
    layer = size * (7 * vision.hidden_size + 3 * vision.intermediate_size)
    per_patch, num_layers = layer, 1
    if question.trains_vision and act == "backward":
        inputs = size * vision.hidden_size if question.gradient_checkpointing else layer
        per_patch, num_layers = layer + vision.num_layers * inputs, vision.num_layers
    pixels = vision.patch_elements * (4 + (0 if size == 4 else size))
    parts = (pixels, "pixels"), (per_patch, f"{num_layers} layers of the encoder")
    return tuple(
        MemoryItem(
            what="activations", num_bytes=patches * size, formula=f"images, {patches} patches: {part}", during=(act,)
        )
        for size, part in parts
    )


def _rows(question: MemoryInput, tokens: int, shards: int) -> int:
    """Tokens of a microbatch that one rank computes, padded on the host in float32."""
    share = -(-tokens // shards)
    return padded_rows(share) if question.on_host and question.dtype == "fp32" else share


def layer_bytes(question: MemoryInput, layer: LayerSize, tokens: int, *, fused: bool) -> int:
    """Bytes that a layer saves for its backward pass."""
    model, size = question.model, DTYPE_BYTES[question.dtype]
    hidden, query, key, width = model.hidden_size, model.query_width, model.key_width, layer.active_width
    # A norm saves its input (unfused: in float32, and its normalised value), and its output is the input of products.
    norm = size if fused else 4 + (0 if size == 4 else size)
    normed = norm + (0 if fused else size if size == 4 else 0)
    per_token = 2 * hidden * (normed + size)
    if model.normed_heads:
        per_token += (query + key) * normed
    # In float32 on devices, attention repeats keys and values for each query head.
    repeated = query if question.dtype == "fp32" and not question.on_host else key
    per_token += size * (2 * query + 2 * repeated) + _attention_bytes(question)
    per_token += size * width * (3 if fused else 4)
    per_token += size * layer.chosen * 3 * hidden
    return tokens * per_token


def _attention_bytes(question: MemoryInput) -> int:
    """Bytes per token that attention saves beside queries, keys, values and output.

    Short sequences on the host: the attention weights. Otherwise: one number per head, and a copy of the output if
    sequences are computed one by one (float32, hosts).
    """
    model, longest = question.model, question.longest
    if question.on_host and question.dtype == "fp32" and longest <= LONGEST_BLOCKED:
        seen = longest if longest <= BLOCK else (longest + BLOCK) // 2
        return 4 * model.num_heads * seen
    one_by_one = question.on_host or question.dtype == "fp32"
    return 4 * model.num_heads + (DTYPE_BYTES[question.dtype] * model.query_width if one_by_one else 0)


def _kept_bytes(question: MemoryInput, layer: LayerSize, tokens: int) -> int:
    """Bytes that a recomputed layer keeps on the device, see `blocks.prepare_blocks`."""
    model, size = question.model, DTYPE_BYTES[question.dtype]
    if not _is_selective(question):
        return 0 if _offloads(question) else tokens * model.hidden_size * size
    outputs = model.query_width + 2 * model.key_width + model.hidden_size
    outputs += 2 * layer.active_width + max(1, layer.chosen) * model.hidden_size
    # The kernel for short sequences on the host is no operator of torch, so that it is computed again.
    short = question.on_host and question.dtype == "fp32" and question.longest <= LONGEST_BLOCKED
    attended = 0 if short else model.query_width * size + 4 * model.num_heads
    return tokens * ((model.hidden_size + outputs) * size + attended)


def _is_selective(question: MemoryInput) -> bool:
    return question.gradient_checkpointing and getattr(question.config, "recompute_granularity", None) == "selective"


def _offloads(question: MemoryInput) -> bool:
    """True if inputs of layers wait on the host. Where the host is the device, they stay in place."""
    offloads = getattr(question.config, "activation_offloading", False)
    return question.gradient_checkpointing and offloads and not question.on_host


def _backward_bytes(question: MemoryInput, layer: LayerSize, tokens: int) -> int:
    """Bytes of the gradients of a layer's activations and of its largest matrix, while they are computed."""
    model, size = question.model, DTYPE_BYTES[question.dtype]
    widest = max((linear.outputs * linear.inputs for linear in layer.linears), default=0)
    gradients = tokens * (3 * layer.active_width + 2 * model.hidden_size) * size
    return gradients + (size * widest if question.trained_parameters else 0)


def head_bytes(question: MemoryInput, tokens: int, chunk_tokens: int | None, *, backward: bool, keeps: bool) -> int:
    """Bytes of the head's input, of the logits that exist at once, and of their gradients; without the weight's."""
    model, size = question.model, DTYPE_BYTES[question.dtype]
    states = tokens * model.hidden_size * size
    if question.task != "causal_lm":
        return states * (2 if backward else 1)
    scored = _scored(question, tokens)
    chunk = min(scored, chunk_tokens or head_chunk(model.vocab_size, on_host=question.on_host))
    most_kept = kept_tokens(model.vocab_size, chunk_tokens) if keeps else 0
    kept_bytes = 4 * min(scored, most_kept) * model.vocab_size
    if question.on_host:  # compiled kernels work in place, also on kept values
        logits = max(kept_bytes, 4 * chunk * model.vocab_size) + (0 if size == 4 else size) * chunk * model.vocab_size
    else:  # a chunk's logits beside its log-softmax, which is either kept or not
        logits = kept_bytes + 4 * chunk * model.vocab_size * (1 if 0 < scored <= most_kept else 2)
    states += scored * model.hidden_size * size * (2 if backward else 1)
    if not backward or question.compared is None:
        return states + logits
    # The comparison's chunks end before those of other outputs begin. The other model's states are float32: of all
    # tokens, and of those that are compared.
    logits = max(logits, 4 * chunk * model.vocab_size * question.compared.num_arrays)
    return states + 2 * 4 * tokens * question.compared.hidden_size + logits


def _scored(question: MemoryInput, tokens: int) -> int:
    """Tokens of a microbatch whose logprobs are computed."""
    if question.logprob_tokens is None or not question.longest:
        return tokens
    return min(tokens, -(-tokens * question.logprob_tokens // question.longest))


def _head_formula(question: MemoryInput, tokens: int, chunk_tokens: int | None, *, backward: bool) -> str:
    if question.task != "causal_lm":
        return f"hidden states of {tokens} tokens"
    vocab = question.model.vocab_size
    chunk = min(_scored(question, tokens), chunk_tokens or head_chunk(vocab, on_host=question.on_host))
    compared = f", compared in {question.compared.num_arrays} arrays" if backward and question.compared else ""
    return f"{chunk} tokens × {vocab} logits at a time{compared}, hidden states of {tokens} tokens"
