#!/usr/bin/env python3
"""What PyTorch takes for the work that `bifocal bench` measures, on one CUDA device.

Writes a results file whose rows have the names of `bifocal bench ops` and `bench step`, the figure
as "peer"; `bifocal bench ... --peer FILE` sets them beside ours. Sizes are those of Qwen3-4B and a
row of 40,960 tokens. Needs torch and transformers; rows of mlstm_kernels and of the assembled
Bifocal step are left out where that package is missing.

    python3 tests/peers/peers.py --output peers.json            # single ops
    python3 tests/peers/peers.py --output peers.json --steps    # whole steps too
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import traceback

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 2560, 9728, 36, 151936
HEADS, KV_HEADS, DIM = 32, 8, 128
BF16 = torch.bfloat16


class Results:
    """Rows of one file, which is complete after each of them."""

    def __init__(self, path):
        self.path = path
        self.rows = []

    def add(self, name, unit, values, peer_name, **extra):
        row = {"name": name, "unit": unit, "peer": statistics.median(values), "peer_name": peer_name,
               "samples": len(values), "low": min(values), "high": max(values), **extra}
        print(json.dumps(row), flush=True)
        self.extend([row])

    def extend(self, rows):
        self.rows += rows
        head = {"what": "peers", "command": " ".join(sys.argv), "date": time.strftime("%Y-%m-%d"),
                "machine": "1x " + torch.cuda.get_device_name(),
                "notes": f"torch {torch.__version__}"}
        with open(self.path, "w", encoding="utf-8") as file:
            json.dump({**head, "rows": self.rows}, file, indent=1)
            file.write("\n")


def milliseconds(function, repeats=10, warmups=3):
    """Device time of each repetition."""
    for _ in range(warmups):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in zip(events, events[1:])]


def normal(*shape, deviation=1.0, grad=False, dtype=BF16):
    x = torch.randn(*shape, device="cuda", dtype=dtype) * deviation
    return x.requires_grad_() if grad else x


def has_mlstm():
    return importlib.util.find_spec("mlstm_kernels") is not None


def mlstm_kernel():
    from mlstm_kernels.torch import get_mlstm_kernel

    return get_mlstm_kernel("chunkwise--triton_xl_chunk")


# ---- single ops ----------------------------------------------------------------------------------


def bench_copy(out, _tokens):
    x = normal(1 << 30)
    y = torch.empty_like(x)
    out.add("copy_2gib", "ms", milliseconds(lambda: y.copy_(x)), "PyTorch copy")


def bench_products(out, tokens):
    for name, inner, outer in (("linear_qkv", HIDDEN, (HEADS + 2 * KV_HEADS) * DIM),
                               ("linear_o", HEADS * DIM, HIDDEN),
                               ("linear_gate_up", HIDDEN, 2 * INTERMEDIATE),
                               ("linear_down", INTERMEDIATE, HIDDEN)):
        x, weight = normal(tokens, inner), normal(outer, inner, deviation=0.02)
        d_y = normal(tokens, outer)
        out.add(name, "ms", milliseconds(lambda: x @ weight.t()), "cuBLAS through PyTorch")
        out.add(name + "_backward", "ms", milliseconds(lambda: (d_y @ weight, d_y.t() @ x)),
                "cuBLAS through PyTorch, bf16 weight gradient")


def bench_teacher_attention(out, tokens):
    q = normal(1, HEADS, tokens, DIM)
    k, v = normal(1, KV_HEADS, tokens, DIM), normal(1, KV_HEADS, tokens, DIM)
    with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        times = milliseconds(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), 7, 2)
    out.add("teacher_attention", "ms", times, "cuDNN through PyTorch")


def windowed_attention(tokens, window, document=0):
    """Sliding attention with a learned sink, compiled. The sink only scales the output."""
    def visible(_b, _h, i, j):
        near = (i >= j) & (i - j < window)
        return near & (i // document == j // document) if document else near

    mask = create_block_mask(visible, None, None, tokens, tokens, device="cuda")

    def attend(q, k, v, sink):
        out, lse = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_lse=True)
        return out * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1).to(out.dtype)

    return attend


def bench_window(out, tokens):
    attend = torch.compile(windowed_attention(tokens, 448))
    q = normal(1, HEADS, tokens, DIM, grad=True)
    k = normal(1, KV_HEADS, tokens, DIM, grad=True)
    v = normal(1, KV_HEADS, tokens, DIM, grad=True)
    sink = normal(HEADS, dtype=torch.float32, grad=True)
    d_out = normal(1, HEADS, tokens, DIM)
    with torch.no_grad():
        out.add("swa448_forward", "ms", milliseconds(lambda: attend(q, k, v, sink)),
                "flex_attention, compiled")
    both = milliseconds(
        lambda: torch.autograd.grad(attend(q, k, v, sink), (q, k, v, sink), d_out), 7, 2)
    out.add("swa448_forward_backward", "ms", both, "flex_attention, compiled")


def bench_mlstm(out, tokens):
    if not has_mlstm():
        print("mlstm_kernels is missing: no mLSTM rows", flush=True)
        return
    kernel = mlstm_kernel()
    # It knows no groups: keys and values are repeated for every query head.
    q, k, v = (normal(1, HEADS, tokens, DIM, grad=True) for _ in range(3))
    i = normal(1, HEADS, tokens, dtype=torch.float32, grad=True)
    f = (normal(1, HEADS, tokens, dtype=torch.float32) + 4.0).requires_grad_()
    d_out = normal(1, HEADS, tokens, DIM)

    def forward():
        return kernel(q, k, v, i, f, chunk_size=128, autocast_kernel_dtype=BF16)

    with torch.no_grad():
        out.add("mlstm_forward", "ms", milliseconds(forward, 7, 2), "mlstm_kernels xl_chunk 128")
    both = milliseconds(lambda: torch.autograd.grad(forward(), (q, k, v, i, f), d_out), 7, 2)
    out.add("mlstm_forward_backward", "ms", both, "mlstm_kernels xl_chunk 128")


def divergence(student, teacher, student_head, teacher_head):
    ours = F.log_softmax((student @ student_head.t()).float(), -1)
    theirs = F.log_softmax((teacher @ teacher_head.t()).float(), -1)
    return (theirs.exp() * (theirs - ours)).sum()


def chunked_divergence(compiled, student, teacher, student_head, teacher_head, chunk=2048):
    total = 0.0
    for begin in range(0, student.shape[0], chunk):
        rows = slice(begin, begin + chunk)
        total = total + checkpoint(compiled, student[rows], teacher[rows], student_head,
                                   teacher_head, use_reentrant=False)
    return total / student.shape[0]


def bench_head(out, tokens):
    compiled = torch.compile(divergence)
    student, teacher = normal(tokens, HIDDEN, grad=True), normal(tokens, HIDDEN)
    heads = [normal(VOCABULARY, HIDDEN, deviation=0.02) for _ in range(2)]
    heads[0].requires_grad_()

    def both():
        loss = chunked_divergence(compiled, student, teacher, *heads)
        torch.autograd.grad(loss, (student, heads[0]))

    out.add("kl_head", "ms", milliseconds(both, 3, 1), "compiled, chunks of 2,048")


def bench_elementwise(out, tokens):
    @torch.compile
    def rms_norm(x, weight):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype) * weight

    @torch.compile
    def swiglu(gate, up):
        return F.silu(gate) * up

    with torch.no_grad():
        x, weight = normal(tokens, HIDDEN), normal(HIDDEN)
        out.add("rms_norm", "ms", milliseconds(lambda: rms_norm(x, weight)), "compiled")
        gate, up = normal(tokens, INTERMEDIATE), normal(tokens, INTERMEDIATE)
        out.add("swiglu", "ms", milliseconds(lambda: swiglu(gate, up)), "compiled")


def bench_adamw(out, _tokens):
    parameters = []
    for _ in range(40):  # 4.02e9 numbers in all
        parameter = normal(4_022_468_096 // 40, dtype=torch.float32, deviation=0.02)
        parameter.grad = normal(parameter.numel(), dtype=torch.float32, deviation=1e-3)
        parameters.append(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.1, fused=True)

    def update():
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    out.add("adamw", "ms", milliseconds(update, 5, 2),
            "torch.optim.AdamW fused, float32, with the norm; no bf16 copy")


# ---- whole steps ---------------------------------------------------------------------------------


def make_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
                         num_hidden_layers=LAYERS, num_attention_heads=HEADS,
                         num_key_value_heads=KV_HEADS, head_dim=DIM, rope_theta=5e6,
                         max_position_embeddings=262144, tie_word_embeddings=True)
    previous = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(previous)
    for layer in model.model.layers:
        layer.mlp.compile()
    return model


class Projections(nn.Module):
    """Queries, keys and values of a layer, normed and rotated, heads first."""

    def __init__(self, attention):
        super().__init__()
        from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

        self.attention = attention
        self.rotate = apply_rotary_pos_emb

    def forward(self, x, cos, sin):
        a, shape = self.attention, (*x.shape[:2], -1, DIM)
        q = a.q_norm(a.q_proj(x).view(shape)).transpose(1, 2)
        k = a.k_norm(a.k_proj(x).view(shape)).transpose(1, 2)
        q, k = self.rotate(q, k, cos, sin)
        return q, k, a.v_proj(x).view(shape).transpose(1, 2)

    def output(self, y):
        return self.attention.o_proj(y.transpose(1, 2).flatten(2))


class PackedAttention(nn.Module):
    """The teacher's attention inside the documents of a packed row."""

    def __init__(self, attention, mask):
        super().__init__()
        self.projections = Projections(attention)
        self.mask = mask

    @torch.compile
    def run(self, x, cos, sin):
        q, k, v = self.projections(x, cos, sin)
        return self.projections.output(
            flex_attention(q, k, v, block_mask=self.mask, enable_gqa=True))

    def forward(self, hidden_states, position_embeddings, **_):
        return self.run(hidden_states, *position_embeddings), None


class WindowMixer(nn.Module):
    """Sliding attention with a sink alone."""

    def __init__(self, attention, attend, _starts):
        super().__init__()
        self.projections = Projections(attention)
        self.attend = attend
        self.sink = nn.Parameter(torch.zeros(HEADS, device="cuda"))

    @torch.compile
    def run(self, x, cos, sin):
        return self.projections.output(self.attend(*self.projections(x, cos, sin), self.sink))

    def forward(self, hidden_states, position_embeddings, **_):
        return self.run(hidden_states, *position_embeddings), None


def repeated(x):
    """A key-value head for every query head."""
    return x.repeat_interleave(HEADS // KV_HEADS, 1).contiguous()


class BifocalMixer(nn.Module):
    """Sliding attention beside an mLSTM, mixed by a gate."""

    def __init__(self, attention, attend, starts):
        super().__init__()
        self.projections = Projections(attention)
        self.attend, self.starts = attend, starts
        self.kernel = mlstm_kernel()
        self.sink = nn.Parameter(torch.zeros(HEADS, device="cuda"))
        square = torch.eye(DIM, device="cuda", dtype=BF16)
        self.feature_q = nn.Parameter(square.repeat(HEADS, 1, 1))
        self.feature_k = nn.Parameter(square.repeat(KV_HEADS, 1, 1))
        self.gates = nn.Linear(HIDDEN, 2 * KV_HEADS + HEADS, device="cuda", dtype=BF16)

    @torch.compile
    def before(self, x, cos, sin):
        q, k, v = self.projections(x, cos, sin)
        near = self.attend(q, k, v, self.sink)
        fq = (q @ self.feature_q.transpose(1, 2)).float().softmax(-1).to(BF16)
        fk = (k @ self.feature_k.transpose(1, 2)).float().softmax(-1).to(BF16)
        i, f, o = self.gates(x).float().transpose(1, 2).split((KV_HEADS, KV_HEADS, HEADS), 1)
        f = torch.where(self.starts, -25.0, f + 6.0)  # a document forgets the one before it
        return (near, fq.contiguous(), repeated(fk), repeated(v), repeated(i), repeated(f),
                o.sigmoid().unsqueeze(-1))

    @torch.compile
    def after(self, near, far, share):
        return self.projections.output((share * far + (1.0 - share) * near).to(BF16))

    def forward(self, hidden_states, position_embeddings, **_):
        near, *inputs, share = self.before(hidden_states, *position_embeddings)
        far = self.kernel(*inputs, chunk_size=128, autocast_kernel_dtype=BF16)
        return self.after(near, far, share), None


def bench_step(out, tokens, name, mixer, window, document):
    """Teacher forward, student forward and backward with checkpointing, KL, clipping, AdamW with
    bf16 weights and moments."""
    teacher, student = make_model().eval(), make_model().train()
    position = torch.arange(tokens, device="cuda")
    starts = position % document == 0 if document else position < 0
    attend = windowed_attention(tokens, window, document)
    for layer in student.model.layers:
        layer.self_attn = mixer(layer.self_attn, attend, starts)
    if document:
        mask = create_block_mask(lambda _b, _h, i, j: (i >= j) & (i // document == j // document),
                                 None, None, tokens, tokens, device="cuda")
        for layer in teacher.model.layers:
            layer.self_attn = PackedAttention(layer.self_attn, mask)
    student.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5, fused=True)
    compiled = torch.compile(divergence)
    ids = torch.randint(0, VOCABULARY, (1, tokens), device="cuda")

    def teacher_forward():
        with torch.no_grad(), sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return teacher.model(ids, use_cache=False).last_hidden_state[0]

    def step():
        target = teacher_forward()
        hidden = student.model(ids, use_cache=False).last_hidden_state[0]
        chunked_divergence(compiled, hidden, target, student.lm_head.weight,
                           teacher.lm_head.weight).backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    torch.cuda.reset_peak_memory_stats()
    times = [t / 1e3 for t in milliseconds(step, 3, 2)]
    peak = torch.cuda.max_memory_allocated()
    out.add(name, "s", times, "PyTorch assembly", peak_bytes=peak)
    forward = [t / 1e3 for t in milliseconds(teacher_forward, 3, 1)]
    out.add("teacher_forward_packed" if document else "teacher_forward", "s", forward,
            "transformers, " + ("flex_attention" if document else "cuDNN attention"))


OPS = (bench_copy, bench_products, bench_teacher_attention, bench_window, bench_mlstm, bench_head,
       bench_elementwise, bench_adamw)
STEPS = {"step_bifocal_40960": (BifocalMixer, 448, 0),
         "step_bifocal_packed": (BifocalMixer, 448, 4096),
         "step_swa_40960": (WindowMixer, 576, 0)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--output", required=True)
    parser.add_argument("--tokens", type=int, default=40960)
    parser.add_argument("--only", action="append", help="part of a function's or step's name")
    parser.add_argument("--steps", action="store_true", help="whole steps too")
    parser.add_argument("--one-step", help="one whole step and nothing else (used by --steps)")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    out = Results(arguments.output)
    if arguments.one_step:
        mixer, window, document = STEPS[arguments.one_step]
        bench_step(out, arguments.tokens, arguments.one_step, mixer, window, document)
        return

    def wanted(name):
        return not arguments.only or any(part in name for part in arguments.only)

    failed = []
    for bench in OPS:
        if not wanted(bench.__name__):
            continue
        begin = time.time()
        try:
            bench(out, arguments.tokens)
        except Exception:  # the others are still worth having
            traceback.print_exc()
            failed.append(bench.__name__)
        torch.cuda.empty_cache()
        print(f"{bench.__name__}: {time.time() - begin:.1f} s", flush=True)
    for name, (mixer, _, _) in STEPS.items():
        if not arguments.steps or not wanted(name):
            continue
        if mixer is BifocalMixer and not has_mlstm():
            print(f"mlstm_kernels is missing: no {name}", flush=True)
            continue
        # A process of its own gives all memory back.
        part = f"{arguments.output}.{name}"
        done = subprocess.run([sys.executable, __file__, "--output", part, "--one-step", name,
                               "--tokens", str(arguments.tokens)], check=False)
        if done.returncode != 0:
            failed.append(name)
            continue
        with open(part, encoding="utf-8") as file:
            out.extend(json.load(file)["rows"])
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
