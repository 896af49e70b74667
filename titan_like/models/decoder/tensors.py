"""Where transformers' classes store the parameters of decoders."""

from collections.abc import Iterator
from dataclasses import replace

from titan_like.models.decoder.class_row import NAMES, Class
from titan_like.models.decoder.classes import CLASSES
from titan_like.models.decoder.config import DecoderConfig
from titan_like.models.decoder.mixers import DeltaMixer, KimiDeltaMixer, LatentMixer, MambaMixer, SoftmaxMixer
from titan_like.models.hugging_face import Stored, fused, linear, whole

_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
_MATRICES = ("gate", "up", "down")


def stored_parameters(config: DecoderConfig, row: Class = CLASSES[0]) -> Iterator[Stored]:
    """Where each parameter of the model is stored. Names and shapes of parameters are the same in all classes."""
    names = NAMES | dict(row.names)
    table, head = (config.padded_vocab_size, config.hidden_size), f"{names['output']}.weight"
    dense_layers = config.dense_layers
    numbers = range(config.num_layers, config.num_layers + config.mtp_layers)  # which have copies of both tables
    of_table, of_head = (
        [f"{names['layers']}.{i}.{names[name]}.weight" for i in numbers] for name in ("mtp.embedding", "mtp.output")
    )
    copies = [*of_table, *([head, *of_head] if config.tied_embeddings else [])]
    yield whole("embedding.weight", f"{names['embedding']}.weight", table, config.vocab_size, copies=tuple(copies))
    for layer in range(numbers.stop):
        ours = f"layers.{layer}."
        theirs = {name: f"{names['layers']}.{layer}.{of_layer}" for name, of_layer in names.items()}
        parts, mixer = config.kind(config.kind_of(layer)).parts, config.mixer_of(config.kind_of(layer))
        lacking = {"mlp": "attention", "mixer": "mlp"}.get(parts, "neither")
        for name in {"sandwich": _NORMS, "parallel_one_norm": _NORMS[:1]}.get(config.block, _NORMS[::2]):
            if not name.startswith(lacking):
                yield from _norm(config, ours + name, theirs[name])
        if parts == "mlp":
            pass
        elif isinstance(mixer, DeltaMixer):
            yield from _delta_net(config, row, mixer, ours, theirs)
        elif isinstance(mixer, KimiDeltaMixer):
            yield from _kimi_delta(config, mixer, ours, theirs)
        elif isinstance(mixer, MambaMixer):
            yield from _mamba(config, mixer, ours, theirs)
        elif isinstance(mixer, LatentMixer):
            yield from _latents(config, row, ours, theirs)
        else:  # a mixer of a package may have attention's projections; `class_of` refuses its export
            yield from _attention(config, row, ours, theirs, isinstance(mixer, SoftmaxMixer) and mixer.gate)
        if config.num_experts and layer not in dense_layers:
            yield from _experts(config, row, ours, theirs)
        elif parts != "mixer":
            yield from _mlp(config, f"{ours}mlp", "mlp", theirs, config.ffn_hidden_size)
        if layer in numbers:
            for name in ("enorm", "hnorm", "norm"):
                yield from _norm(config, ours + name, theirs[f"mtp.{name}"])
            shape = (config.hidden_size, 2 * config.hidden_size)
            yield from linear(f"{ours}eh_proj", theirs["mtp.eh_proj"], shape, False)
    yield from _norm(config, "norm", names["norm"])
    if not config.tied_embeddings:
        yield whole("output.weight", head, table, config.vocab_size, copies=tuple(of_head))
    if config.output_bias:
        yield whole("output_bias.bias", f"{names['output']}.bias", table[:1], config.vocab_size)


def _norm(config: DecoderConfig, ours: str, theirs: str) -> Iterator[Stored]:
    if config.norm != "layer_no_weight":
        yield from linear(ours, theirs, (config.hidden_size,), config.norm == "layer")


def _delta_net(
    config: DecoderConfig, row: Class, mixer: DeltaMixer, ours: str, theirs: dict[str, str]
) -> Iterator[Stored]:
    ours, hidden, groups, heads = f"{ours}attention.", config.hidden_size, mixer.key_heads, mixer.value_heads
    keys, values = groups * mixer.key_head_size, heads * mixer.value_head_size
    widths = {"q": keys, "k": keys, "b": heads, "a": heads}  # all others are of values
    for name, parts in {"qkvz": (keys, keys, values, values), "ba": (heads, heads)}.items():
        of_both = [one for one in row.delta_matrices if (one in "ba") == (name == "ba")]
        rows = {theirs["delta.matrix"].format(one): sum(widths.get(part, values) for part in one) for one in of_both}
        order = ((), 1) if of_both == [name] else (parts, groups)
        yield Stored(f"{ours}{name}.weight", (sum(parts), hidden), _weights(rows, hidden), *order)
    conv = whole(f"{ours}core.conv", theirs["delta.conv"], (2 * keys + values, 1, mixer.conv_size))
    yield replace(conv, parts=(keys, keys, values), groups=groups)  # in the files all queries' channels come first
    for name in ("a_log", "dt_bias"):
        yield whole(f"{ours}core.{name}", theirs[f"delta.{name}"], (heads,))
    yield from linear(f"{ours}norm", theirs["delta.norm"], (mixer.value_head_size,), False)
    yield from linear(f"{ours}proj", theirs["delta.proj"], (hidden, values), False)


def _kimi_delta(config: DecoderConfig, mixer: KimiDeltaMixer, ours: str, theirs: dict[str, str]) -> Iterator[Stored]:
    ours, hidden, heads, size = f"{ours}attention.", config.hidden_size, mixer.heads, mixer.head_size
    width, taps = heads * size, mixer.conv_size
    latents = {theirs["kimi.latents"].format(part): size for part in "fg"}
    yield Stored(f"{ours}latents.weight", (2 * size, hidden), _weights(latents, hidden))
    ours = f"{ours}heads."
    for name, columns in {"qkv": (hidden,), "core.conv": (1, taps)}.items():
        rows = {theirs[f"kimi.{name}"].format(part): width for part in "qkv"}
        label = ours + name + (".weight" if name == "qkv" else "")
        yield Stored(label, (3 * width, *columns), _weights(rows, *columns), (width,) * 3, heads)
    for name, shape in {"beta": (heads, hidden), "step": (width, size), "gate": (width, size), "norm": (size,)}.items():
        yield from linear(f"{ours}{name}", theirs[f"kimi.{name}"], shape, False)
    yield Stored(f"{ours}core.a_log", (heads,), {theirs["kimi.a_log"]: (1, 1, heads, 1)}, matrix_dims=2)
    yield whole(f"{ours}core.dt_bias", theirs["kimi.dt_bias"], (width,))
    yield from linear(f"{ours}proj", theirs["attention.proj"], (hidden, width), False)


def _weights(rows: dict[str, int], *columns: int) -> dict[str, tuple[int, ...]]:
    """The weights of modules with these rows, and their shapes."""
    return {f"{name}.weight": (count, *columns) for name, count in rows.items()}


def _mamba(config: DecoderConfig, mixer: MambaMixer, ours: str, theirs: dict[str, str]) -> Iterator[Stored]:
    """One matrix has the rows of gates, inputs, b, c and steps, and one convolution those of inputs, b and c."""
    ours, heads, groups = f"{ours}attention.", mixer.heads, mixer.groups
    width, states = heads * mixer.head_size, groups * mixer.state_size
    columns: tuple[int, ...]
    for part, columns in (("weight", (config.hidden_size,)), ("bias", ()))[: 2 if mixer.bias else 1]:
        source = {f"{theirs['mamba.in_proj']}.{part}": (2 * (width + states) + heads, *columns)}
        name = f"{ours}{{}}.{part}"
        yield Stored(name.format("zx"), (2 * width, *columns), source, (width, width), heads, taken=(2 * width,))
        taken = (2 * width, -heads)
        yield Stored(name.format("bc"), (2 * states, *columns), source, (states, states), groups, taken=taken)
        yield Stored(name.format("dt"), (heads, *columns), source, taken=(-heads, None))
    for part, columns in (("weight", (1, mixer.conv_size)), ("bias", ()))[: 2 if mixer.conv_bias else 1]:
        source = {f"{theirs['mamba.conv']}.{part}": (width + 2 * states, *columns)}
        yield Stored(f"{ours}x_conv.{part}", (width, *columns), source, taken=(width,))
        name = f"{ours}bc_conv.{part}"
        yield Stored(name, (2 * states, *columns), source, (states, states), groups, taken=(width, None))
    for name in ("a_log", "dt_bias", "skip"):
        yield whole(f"{ours}core.{name}", theirs[f"mamba.{name}"], (heads,))
    yield from linear(f"{ours}norm", theirs["mamba.norm"], (width,), False)
    yield from linear(f"{ours}proj", theirs["mamba.proj"], (config.hidden_size, width), mixer.bias)


def _attention(
    config: DecoderConfig, row: Class, ours: str, theirs: dict[str, str], has_gate: bool
) -> Iterator[Stored]:
    hidden, width, head = config.hidden_size, config.attention_size, config.head_dim
    pairs = (head, 0, config.rotary_size) if row.is_interleaved else None
    qkv = theirs["attention.qkv"]
    sources = tuple(qkv.format(part) for part in "qkv") if "{}" in qkv else (qkv,)
    for part, columns in (("weight", (hidden,)), ("bias", ()))[: 1 if config.attention_bias == "none" else 2]:
        tensors = tuple(f"{source}.{part}" for source in sources)
        if row.has_fused_heads:  # ordered as ours
            rows = (width + 2 * config.num_kv_heads * head, *columns)
            yield whole(f"{ours}attention.qkv.{part}", tensors[0], rows)
        else:
            yield fused(config, f"{ours}attention.qkv.{part}", columns, tensors, pairs=pairs, has_gate=has_gate)
    has_bias = config.attention_bias == "all"
    yield from linear(f"{ours}attention.proj", theirs["attention.proj"], (hidden, width), has_bias)
    if config.attention_sinks:
        name = "attention.core.sinks"
        yield whole(ours + name, theirs[name], (config.num_attention_heads,))
    norms = {"head": (head,) * 2}.get(config.qk_norm, (width, config.num_kv_heads * head))
    for name, size in zip(("attention.q_norm", "attention.k_norm"), norms, strict=False):
        source, is_stacked = theirs[name], "{}" not in theirs[name]
        if config.qk_norm == "heads":  # one tensor, or one for each head
            of_heads: dict[str, tuple[int, ...]] = {f"{source}.weight": (size // head, head)}
            if not is_stacked:
                of_heads = {f"{source.format(number)}.weight": (head,) for number in range(size // head)}
            yield Stored(f"{ours}{name}.weight", (size,), of_heads, matrix_dims=int(is_stacked), pairs=pairs)
        elif config.qk_norm in ("head", "all") and config.norm != "layer_no_weight":
            yield from linear(ours + name, source, (size,), config.norm == "layer", pairs=pairs)


def _latents(config: DecoderConfig, row: Class, ours: str, theirs: dict[str, str]) -> Iterator[Stored]:
    ours = f"{ours}attention."
    hidden, heads = config.hidden_size, config.num_attention_heads
    nope, rope, value = config.nope_head_size, config.rope_head_size, config.value_head_size
    queries, keys, has_bias = config.q_lora_rank, config.kv_lora_rank, config.attention_bias == "all"
    is_in_pairs = row.is_interleaved and not config.stores_rope_in_halves
    of_head = (nope + rope, nope, rope) if is_in_pairs else None
    if queries:
        yield from linear(f"{ours}q_a", theirs["latent.q_a"], (queries, hidden), has_bias)
        yield from linear(f"{ours}q_norm", theirs["latent.q_norm"], (queries,), False)
    q = theirs["latent.q_b" if queries else "latent.q"]
    yield from linear(f"{ours}heads.q", q, (heads * (nope + rope), queries or hidden), False, pairs=of_head)
    latent = (keys + rope, keys, rope) if is_in_pairs else None
    yield from linear(f"{ours}kv_a", theirs["latent.kv_a"], (keys + rope, hidden), has_bias, pairs=latent)
    yield from linear(f"{ours}kv_norm", theirs["latent.kv_norm"], (keys,), False)
    yield from linear(f"{ours}heads.kv", theirs["latent.kv_b"], (heads * (nope + value), keys), False)
    yield from linear(f"{ours}heads.proj", theirs["attention.proj"], (hidden, heads * value), has_bias)


def _mlp(config: DecoderConfig, ours: str, name: str, theirs: dict[str, str], ffn: int) -> Iterator[Stored]:
    is_joined = theirs[f"{name}.gate"] == theirs[f"{name}.up"]  # gate above up
    for matrix in _MATRICES if config.gated else _MATRICES[1:]:
        source = theirs[f"{name}.{matrix}"]
        shape = (config.hidden_size, ffn) if matrix == "down" else (ffn, config.hidden_size)
        for part, size in (("weight", shape), ("bias", shape[:1]))[: 2 if config.mlp_bias else 1]:
            label = f"{ours}.{matrix}.{part}"
            if is_joined and matrix != "down":
                taken = (ffn,) if matrix == "gate" else (ffn, None)
                yield Stored(label, size, {f"{source}.{part}": (2 * ffn, *size[1:])}, taken=taken)
            else:
                other = theirs.get(f"{name}.{matrix}, or")
                otherwise = None if other is None else whole(label, f"{other}.{part}", size)
                yield replace(whole(label, f"{source}.{part}", size), otherwise=otherwise)
    if config.activation == "xielu":
        for number in ("alpha_p", "alpha_n", "beta", "eps"):
            is_buffer = number in ("beta", "eps")
            sources: dict[str, tuple[int, ...]] = {f"{theirs['mlp.activation']}.{number}": () if is_buffer else (1,)}
            yield Stored(f"{ours}.activation.{number}", (1,), sources, is_buffer=is_buffer)


def _experts(config: DecoderConfig, row: Class, ours: str, theirs: dict[str, str]) -> Iterator[Stored]:
    experts, hidden, ffn = config.num_experts, config.hidden_size, config.expert_ffn_hidden_size
    yield whole(f"{ours}mlp.router.weight", f"{theirs['mlp.router']}.weight", (experts, hidden))
    if config.router_bias:
        yield whole(f"{ours}mlp.router.logit_bias", f"{theirs['mlp.router']}.bias", (experts,))
    if config.balance == "bias":
        of_bias = (1, experts) if row.has_stacked_bias else (experts,)
        bias = Stored(f"{ours}mlp.router.bias", (experts,), {theirs["mlp.router.bias"]: of_bias}, is_buffer=True)
        yield replace(bias, matrix_dims=int(row.has_stacked_bias))
    for name in _MATRICES:
        source = theirs[f"mlp.experts.{name}"]
        rows, columns = (hidden, ffn) if name == "down" else (ffn, hidden)
        sizes: dict[str, tuple[int, ...]] = {"weight": (rows, columns), "bias": (rows,)}
        for part in ("weight", "bias") if config.expert_bias else ("weight",):
            size = sizes[part]
            label, shape = f"{ours}mlp.experts.{name}.{part}", (experts * rows, *size[1:])
            joined, times = {"gate": ((ffn,), 2), "up": ((ffn, None), 2), "down": ((), 1)}[name]  # gate above up
            if "{}" in source:
                tensors = (f"{source.format(expert)}.{part}" for expert in range(experts))
                one = Stored(label, shape, dict.fromkeys(tensors, size))
                if (together := theirs.get(f"mlp.experts.{name}, or")) is not None:
                    of_all: dict[str, tuple[int, ...]] = {together: (experts, times * rows, columns)}
                    one = replace(one, otherwise=Stored(label, shape, of_all, matrix_dims=1, taken=joined))
                yield one
            elif row.transposed_experts:
                halves: list[tuple[int | None, ...]] = [(ffn,), (ffn, None)]
                if row.transposed_experts == "in turn":
                    halves = [(0, None, 2), (1, None, 2)]
                taken, times = {"gate": (halves[0], 2), "up": (halves[1], 2), "down": ((), 1)}[name]
                sources = {f"{source}{'_bias' if part == 'bias' else ''}": (experts, *size[1:], times * rows)}
                yield Stored(label, shape, sources, is_transposed=part == "weight", matrix_dims=1, taken=taken)
            else:
                sources = {f"{source}.{part}": (experts, times * rows, *size[1:])}
                yield Stored(label, shape, sources, matrix_dims=1, taken=joined)
    if config.num_shared_experts:
        yield from _mlp(config, f"{ours}mlp.shared", "mlp.shared", theirs, config.shared_width)
    if config.shared_expert_gate:
        yield from linear(f"{ours}mlp.shared_gate", theirs["mlp.shared_gate"], (1, hidden), False)
