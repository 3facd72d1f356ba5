"""Exported students in Hugging Face transformers: the same logits and the same answers as ours."""

import json
import math

import pytest
import torch
import transformers
from support import (
    MACHINE,
    assert_close,
    assert_same_answer,
    code_of,
    export,
    generate,
    load,
    logits_of,
    our_answers,
    our_logits,
    padded,
    random_ids,
)

BASES = ("qwen3", "qwen2", "llama")
MIXERS = ("swa_learned_sink", "swa_sink_tokens", "bifocal", "bifocal_query", "mixed_1", "mixed_2")
ALL = [f"{base}-{tie}-{mixers}" for base in BASES for tie in ("tied", "untied") for mixers in MIXERS]
# Enough for what does not depend on the base type: each kind of mixer once.
SOME = [f"{BASES[i % 3]}-{('tied', 'untied')[i % 2]}-{mixers}" for i, mixers in enumerate(MIXERS)]


@pytest.mark.parametrize("name", ALL)
def test_logits_are_ours(students, tmp_path, name):
    # Lengths around the chunks of 64 and blocks of 256, all far beyond the windows but the first.
    documents = {str(count): random_ids(count, count) for count in (1, 64, 65, 300)}
    ours = our_logits(students / name, documents, tmp_path)
    model = load(students / name)
    for count, ids in documents.items():
        assert_close(logits_of(model, ids), ours[count])


@pytest.mark.parametrize("name", ALL)
def test_greedy_answers_are_ours(students, tmp_path, name):
    prompts = [random_ids(count, 7 + count) for count in (1, 40, 3)]
    ours = our_answers(students / name, prompts, 200, tmp_path)
    assert all(len(answer) == 200 for answer in ours)
    model = load(students / name)
    for prompt, answer, wanted in zip(prompts, generate(model, *padded(prompts)).tolist(), ours):
        assert_same_answer(model, prompt, answer, wanted)


@pytest.mark.parametrize("name", SOME)
def test_left_padded_batches_answer_like_single_prompts(students, name):
    model = load(students / name)
    prompts = [random_ids(count, count) for count in (2, 70, 33, 1)]
    ids, mask = padded(prompts, pad=5)
    together = generate(model, ids, mask, new_tokens=40)
    for prompt, answer in zip(prompts, together):
        alone = generate(model, torch.tensor([prompt]), new_tokens=40)[0].tolist()
        assert_same_answer(model, prompt, answer.tolist(), alone)


@pytest.mark.parametrize("name", SOME)
def test_padding_leaves_logits_alone_wherever_it_is(students, name):
    model = load(students / name)
    ids = random_ids(90, 1)
    wanted = logits_of(model, ids)
    for spread in (lambda t: t + 30, lambda t: t, lambda t: t + t // 7 * 3):  # left, right, in between
        places = [spread(t) for t in range(90)]
        row = torch.full((1, max(places) + 20), 9)
        mask = torch.zeros_like(row)
        row[0, places], mask[0, places] = torch.tensor(ids), 1
        with torch.no_grad():
            got = model(row, attention_mask=mask).logits[0, places]
        assert_close(got, wanted)


@pytest.mark.parametrize("name", SOME)
def test_prompts_in_pieces_are_prompts_at_once(students, name):
    model = load(students / name)
    ids = torch.tensor([random_ids(150, 2), [4] * 60 + random_ids(90, 3)])
    mask = torch.ones_like(ids)
    mask[1, :60] = 0
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        for pieces in ([1] * 150, [7, 64, 1, 78], [149, 1]):
            cache = code_of(model).BifocalCache(model.config)
            begin, parts = 0, []
            for count in pieces:
                end = begin + count
                out = model(ids[:, begin:end], attention_mask=mask[:, :end], use_cache=True,
                            **{code_of(model).CACHE: cache})  # fmt: skip
                parts.append(out.logits)
                begin = end
            assert cache.get_seq_length() == 150 and cache.lengths.tolist() == [150, 90]
            got = torch.cat(parts, dim=1)
            assert_close(got[0], whole[0])
            assert_close(got[1, 60:], whole[1, 60:])


def test_generate_takes_prompts_in_chunks(students):
    model = load(students / "qwen3-tied-bifocal")
    ids, mask = padded([random_ids(130, 4), random_ids(50, 5)])
    wanted = generate(model, ids, mask, new_tokens=30)
    assert torch.equal(generate(model, ids, mask, new_tokens=30, prefill_chunk_size=16), wanted)


@pytest.mark.parametrize("name", SOME)
def test_cache_changes_nothing(students, name):
    model = load(students / name)
    ids, mask = padded([random_ids(30, 6), random_ids(9, 7)])
    assert torch.equal(generate(model, ids, mask, 24), generate(model, ids, mask, 24, use_cache=False))


@pytest.mark.parametrize("name", [name for name in SOME if "mixed" not in name])
def test_cache_has_a_constant_size(students, name):
    model = load(students / name)
    cache = code_of(model).BifocalCache(model.config)
    sizes = []
    for begin in range(0, 400, 100):
        logits_of(model, random_ids(100, begin), use_cache=True, **{code_of(model).CACHE: cache})
        sizes.append(cache.nbytes())
    assert len(set(sizes)) == 1
    config, expected = model.config, 0
    for mixer in config.mixers:  # one slot more than the window, for what is not kept
        slots = mixer["window"] + mixer["sink_tokens"] + 1
        states = {"none": 0, "kv": config.num_key_value_heads, "query": config.num_attention_heads}[mixer["states"]]
        expected += slots * (2 * config.num_key_value_heads * config.head_dim * 4 + 8)
        expected += states * (config.head_dim**2 + config.head_dim + 1) * 4
    assert sizes[0] == expected


def test_answers_go_on_from_a_cache(students):
    model = load(students / "qwen2-tied-bifocal")
    cache = code_of(model).BifocalCache(model.config)
    ids = torch.tensor([random_ids(60, 8)])
    first = generate(model, ids, new_tokens=20, **{code_of(model).CACHE: cache})
    so_far = torch.cat([ids, first, torch.tensor([random_ids(10, 9)])], dim=1)
    again = generate(model, so_far, new_tokens=20, **{code_of(model).CACHE: cache})
    assert torch.equal(again, generate(model, so_far, new_tokens=20))


def test_sampling_follows_its_seed_and_the_distribution(students):
    model = load(students / "llama-tied-bifocal")
    ids = torch.tensor([random_ids(20, 10)]).expand(400, -1)

    def draw(seed):
        torch.manual_seed(seed)
        return generate(model, ids, new_tokens=1, do_sample=True, top_k=0, temperature=1.0)[:, 0]

    assert torch.equal(draw(1), draw(1))
    drawn = torch.cat([draw(seed) for seed in range(5)])
    share = torch.bincount(drawn, minlength=53) / drawn.numel()
    wanted = logits_of(model, ids[0].tolist())[-1].softmax(-1)
    assert (share - wanted).abs().max() < 5 * math.sqrt(0.25 / drawn.numel())  # five deviations at most


@pytest.mark.parametrize("name", ["qwen3-untied-bifocal", "llama-tied-mixed_1"])
def test_beam_search_reorders_the_cache(students, name):
    model = load(students / name)
    ids, mask = padded([random_ids(25, 11), random_ids(14, 12)])
    options = {"num_beams": 4, "num_return_sequences": 2}
    with_cache = generate(model, ids.clone(), mask, 16, **options)
    assert torch.equal(with_cache, generate(model, ids, mask, 16, use_cache=False, **options))


def test_loss_is_the_cross_entropy_of_the_next_token(students):
    model = load(students / "qwen3-tied-bifocal_query")
    ids = torch.tensor([random_ids(50, 13)])
    labels = ids.clone()
    labels[0, :20] = -100
    with torch.no_grad():
        out = model(ids, labels=labels)
    wanted = torch.nn.functional.cross_entropy(out.logits[0, 19:-1], ids[0, 20:])
    assert abs(out.loss.item() - wanted.item()) < 1e-5


def test_gradients_reach_every_parameter(students):
    model = load(students / "qwen2-untied-bifocal")
    ids = torch.tensor([random_ids(80, 14)])
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all() and parameter.grad.any(), name


@pytest.mark.parametrize("name", SOME)
def test_saving_and_loading_keeps_the_logits(students, tmp_path, name):
    model = load(students / name)
    ids = random_ids(100, 15)
    wanted = logits_of(model, ids)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    assert len(list((tmp_path / "saved").glob("model-*.safetensors"))) > 1
    assert torch.equal(logits_of(load(tmp_path / "saved"), ids), wanted)
    # Ours reads what transformers wrote.
    assert_close(our_logits(tmp_path / "saved", {"a": ids}, tmp_path)["a"], wanted)


@pytest.mark.parametrize("name", SOME)
def test_bfloat16_keeps_float32_states(students, name):
    narrow = load(students / name, dtype=torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in narrow.parameters())
    cache = code_of(narrow).BifocalCache(narrow.config)
    ids = random_ids(120, 16)
    got = logits_of(narrow, ids, use_cache=True, **{code_of(narrow).CACHE: cache})
    assert got.dtype == torch.bfloat16
    for layer, mixer in zip(cache.layers, narrow.config.mixers):
        if mixer["states"] != "none":
            assert layer.C.dtype == layer.n.dtype == layer.m.dtype == torch.float32
        if mixer["window"] != 0:
            assert layer.keys.dtype == torch.bfloat16
    # bfloat16 has 8 bits, which three layers spread to a few percent: 0.035 was the worst seen.
    assert_close(got.float(), logits_of(load(students / name), ids), 0.1)
    assert generate(narrow, torch.tensor([ids]), new_tokens=10).shape == (1, 10)


def test_positions_may_pass_the_configured_maximum(students, tmp_path):
    name = "llama-untied-bifocal"
    ids = random_ids(1300, 17)
    model = load(students / name)
    assert model.config.max_position_embeddings == 1024
    assert_close(logits_of(model, ids), our_logits(students / name, {"a": ids}, tmp_path)["a"])


def definition(fq, fk, v, i, log_f):
    """The mLSTM token by token: fq [S, R, T, d], fk and v [S, T, d], i and log_f [S, T]."""
    states, width = fk.shape[0], fk.shape[-1]
    c, n = fk.new_zeros(states, width, width), fk.new_zeros(states, width)
    m = fk.new_full((states,), -math.inf)
    reads = []
    for t in range(fk.shape[1]):
        new_m = torch.maximum(log_f[:, t] + m, i[:, t])
        decay, gain = torch.exp(log_f[:, t] + m - new_m), torch.exp(i[:, t] - new_m)
        c = decay[:, None, None] * c + gain[:, None, None] * fk[:, t, :, None] * v[:, t, None, :]
        n = decay[:, None] * n + gain[:, None] * fk[:, t]
        m = new_m
        reads.append((fq[:, :, t] @ c) / ((fq[:, :, t] * n[:, None]).sum(-1, keepdim=True) + 1e-30))
    return torch.stack(reads, dim=2), (c, n, m)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_chunkwise_mlstm_is_the_definition(students, scale):
    code = code_of(load(students / "qwen3-tied-bifocal"))
    make = torch.Generator().manual_seed(18)
    states, heads, count, width = 2, 3, 200, 16
    fq = torch.randn(states, heads, count, width, generator=make).softmax(-1)
    fk = torch.randn(states, count, width, generator=make).softmax(-1)
    v = torch.randn(states, count, width, generator=make)
    i = scale * torch.randn(states, count, generator=make)
    log_f = torch.nn.functional.logsigmoid(scale * torch.randn(states, count, generator=make))
    wanted, (c, n, m) = definition(*(tensor.double() for tensor in (fq, fk, v, i, log_f)))
    state = (torch.zeros(1, states, width, width), torch.zeros(1, states, width), torch.full((1, states), -math.inf))
    parts = []
    for begin in range(0, count, 64):
        at = slice(begin, begin + 64)
        h, state = code.mlstm_chunk(fq[None, :, :, at], fk[None, :, at], v[None, :, at], i[None, :, at],
                                    log_f[None, :, at], state)  # fmt: skip
        parts.append(h[0])
    assert_close(torch.cat(parts, dim=2).double(), wanted, 1e-5)
    # C and n matter up to the common factor exp(m).
    scaled = torch.exp(state[2][0].double() - m)
    assert_close(state[0][0].double() * scaled[:, None, None], c, 1e-4)
    assert_close(state[1][0].double() * scaled[:, None], n, 1e-4)


def test_what_is_not_supported_says_so(students):
    model = load(students / "qwen3-tied-bifocal")
    ids = torch.tensor([random_ids(12, 19)])
    name = code_of(model).CACHE
    with pytest.raises(ValueError, match="BifocalCache"):
        model(ids, **{name: transformers.DynamicCache()})
    with pytest.raises(ValueError, match="BifocalCache"):
        generate(model, ids, **{name: transformers.DynamicCache()})
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, ids, cache_implementation="static")
    with pytest.raises(ValueError, match="position_ids"):
        model(ids, position_ids=torch.arange(12)[None] + 3)
    with pytest.raises(ValueError, match="attention_mask"):
        model(ids, attention_mask=torch.ones(1, 1, 12, 12))
    with pytest.raises(ValueError, match="attention"):
        model(ids, output_attentions=True)
    with pytest.raises(ValueError, match="assisted|stateful|not supported"):
        generate(model, ids, assistant_model=model)
    with pytest.raises(ValueError, match="cropped"):
        code_of(model).BifocalCache(model.config).layers[0].crop(1)


def test_configurations_that_contradict_themselves_are_refused(students):
    config = load(students / "qwen3-tied-bifocal").config
    good = config.to_dict()
    for key, value, reason in (
        ("base_model_type", "mistral", "base_model_type"),
        ("hidden_act", "gelu", "hidden_act"),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "rope_type"),
        ("num_key_value_heads", 3, "evenly"),
        ("mixers", good["mixers"][:2], "mixers"),
        ("mixers", [{**good["mixers"][0], "window": -1}, *good["mixers"][1:]], "layer 0"),
        ("mixers", [{**good["mixers"][0], "sink": "tokens"}, *good["mixers"][1:]], "layer 0"),
        ("mixers", [{**good["mixers"][0], "window": "full"}, *good["mixers"][1:]], "layer 0"),
    ):
        with pytest.raises(ValueError, match=reason):
            type(config)(**{**good, key: value})


def test_hidden_states_and_tuples(students):
    model = load(students / "llama-tied-swa_sink_tokens")
    ids = torch.tensor([random_ids(12, 20)])
    with torch.no_grad():
        out = model(ids, output_hidden_states=True, logits_to_keep=1)
        assert len(out.hidden_states) == 4 and out.logits.shape == (1, 1, 53)
        torch.testing.assert_close(model.lm_head(out.hidden_states[-1])[:, -1:], out.logits)
        assert torch.equal(model(ids, return_dict=False, logits_to_keep=1)[0], out.logits)


@pytest.mark.parametrize("student", ["bifocal", "swa_learned_sink"])
def test_trained_students_solve_the_same_problems_in_the_same_words(tmp_path, student):
    """Bfloat16 weights that were trained, prompts and answers beyond the window, a padded batch."""
    directory = export(tmp_path / student, "--student.init", MACHINE / student, "--student.preset", "keep",
                       "--teacher.path", MACHINE / "teacher")  # fmt: skip
    problems = [json.loads(line) for line in (MACHINE / "problems.jsonl").read_text().splitlines()]
    prompts = [next(p["prompt_ids"] for p in problems if p["steps"] == steps) for steps in (24, 4, 16)]
    ours = our_answers(directory, prompts, 450, tmp_path)
    model = load(directory)
    ids, mask = padded(prompts)
    answers = model.generate(ids, attention_mask=mask, max_new_tokens=450, do_sample=False)[:, ids.shape[1] :]
    stop = model.generation_config.eos_token_id
    for prompt, answer, wanted in zip(prompts, answers.tolist(), ours):
        assert wanted[-1] == stop and len(wanted) > 60
        assert_same_answer(model, prompt, answer[: len(wanted)], wanted)
