"""heed inside transformers, diffusers and PyTorch's own SDPA. The real libraries are used where they are installed; what
heed does with their arguments is tested without them."""
import importlib.util
import sys
import types

import pytest

torch = pytest.importorskip("torch")
import heed
import torch.nn.functional as F
from torch import nn

from heed.integrations import diffusers as for_diffusers
from heed.integrations import sdpa as for_sdpa
from heed.integrations import transformers as for_transformers

needs = lambda name: pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed")


def qkv(batch=2, heads=4, rows=12, head_dim=16, heads_k=None, keys=None):
    torch.manual_seed(0)
    k_shape = (batch, heads_k or heads, keys or rows, head_dim)
    return torch.randn(batch, heads, rows, head_dim), torch.randn(k_shape), torch.randn(k_shape)


def close(got, want, tolerance=2e-5):
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


# ---- transformers: what the interface does with its arguments --------------------------------------------------------

decoder = types.SimpleNamespace(is_causal=True)
encoder = types.SimpleNamespace(is_causal=False)


def attend(*arguments, **options):
    o, weights = for_transformers.attention_forward(*arguments, **options)
    assert weights is None
    return o.transpose(1, 2)


def test_a_decoder_without_a_mask_is_causal_and_an_encoder_is_not():
    q, k, v = qkv()
    close(attend(decoder, q, k, v, None), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    close(attend(encoder, q, k, v, None), F.scaled_dot_product_attention(q, k, v))
    close(attend(decoder, q, k, v, None, is_causal=False), F.scaled_dot_product_attention(q, k, v))


def test_one_row_sees_the_whole_cache():
    q, k, v = qkv(rows=1, keys=9)
    close(attend(decoder, q, k, v, None), F.scaled_dot_product_attention(q, k, v))


def test_a_static_cache_has_keys_that_are_not_there_yet():
    q, k, v = qkv(rows=5, keys=9)
    want = F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True)
    close(attend(decoder, q, k, v, None), want)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("keys", [5, 9])
def test_fewer_rows_than_positions_are_the_last(rows, keys):
    q, k, v = qkv(rows=5, keys=keys)
    want = F.scaled_dot_product_attention(q, k[:, :, :5], v[:, :, :5], is_causal=True)
    close(attend(decoder, q[:, :, -rows:], k, v, None, position_ids=torch.arange(5)[None]), want[:, :, -rows:])


def test_queries_once_for_all_of_a_batch():
    q, k, v = qkv()
    for q, k, v in (q[:1], k, v), (q, k[:1], v[:1]):
        want = F.scaled_dot_product_attention(q.expand(2, -1, -1, -1), k.expand(2, -1, -1, -1), v.expand(2, -1, -1, -1))
        close(attend(encoder, q, k, v, None), want)


def test_masks_are_bool_or_added_and_replace_causality():
    q, k, v = qkv()
    mask = torch.rand(2, 1, 12, 12) < 0.7
    mask[..., 0] = True
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    close(attend(decoder, q, k, v, mask), want)
    added = torch.zeros(2, 1, 12, 12).masked_fill(~mask, torch.finfo(torch.float32).min)
    close(attend(decoder, q, k, v, added), want)


def test_packed_sequences_that_a_mask_may_not_know():
    q, k, v = qkv(batch=1)
    begins = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = dict(cu_seq_lens_q=begins, cu_seq_lens_k=begins, max_length_q=7, max_length_k=7)
    parts = zip(*(t.split([5, 7], 2) for t in (q, k, v)))
    want = torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
    close(attend(decoder, q, k, v, None, **packed), want)
    close(attend(decoder, q, k, v, torch.ones(1, 1, 12, 12, dtype=torch.bool).tril(), **packed), want)


def test_grouped_heads_scaling_and_softcap():
    q, k, v = qkv(heads_k=2)
    want = F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=True)
    close(attend(encoder, q, k, v, None, scaling=0.3), want)
    k4, v4 = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    want = torch.softmax(5 * torch.tanh(q @ k4.mT * 0.25 / 5), -1) @ v4
    close(attend(encoder, q, k, v, None, softcap=5.0), want)


def test_sinks_and_a_position_bias():
    q, k, v = qkv()
    sinks, bias = torch.randn(4), torch.randn(1, 4, 12, 12)
    scores = torch.cat([q @ k.mT * 0.25, sinks.view(1, 4, 1, 1).expand(2, 4, 12, 1)], -1)
    close(attend(encoder, q, k, v, None, s_aux=sinks), torch.softmax(scores, -1)[..., :-1] @ v)
    close(attend(encoder, q, k, v, None, position_bias=bias), torch.softmax(q @ k.mT * 0.25 + bias, -1) @ v)
    hidden = torch.zeros(12, 12).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), float("-inf"))
    close(attend(decoder, q, k, v, None, position_bias=bias), torch.softmax(q @ k.mT * 0.25 + bias + hidden, -1) @ v)


def test_what_heed_cannot_do_is_said():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="attention weights"):
        attend(decoder, q, k, v, None, output_attentions=True)
    with pytest.raises(ValueError, match="continuous batching"):
        attend(decoder, q, k, v, None, cache=object())
    for name in "indices", "block_indices", "sinks":
        with pytest.raises(ValueError, match=f"{name}: heed does not take what SimpleNamespace says"):
            attend(decoder, q, k, v, None, **{name: torch.zeros(1)})


def test_register_names_both_the_attention_and_the_mask(monkeypatch):
    known = {}
    interface = lambda kind: type(kind, (), {"register": lambda name, function: known.update({(kind, name): function})})
    stub = types.ModuleType("transformers")
    stub.AttentionInterface, stub.AttentionMaskInterface = interface("attention"), interface("mask")
    monkeypatch.setitem(sys.modules, "transformers", stub)
    for_transformers.register()
    assert known == {("attention", "heed"): for_transformers.attention_forward, ("mask", "heed"): for_transformers.make_mask}


# ---- transformers: models --------------------------------------------------------------------------------------------

DECODER = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
               num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MODELS = {
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER | dict(sliding_window=4),
    "Gemma2ForCausalLM": DECODER | dict(sliding_window=4, attn_logit_softcapping=2.0, query_pre_attn_scalar=8),
    "GptOssForCausalLM": DECODER | dict(sliding_window=4, num_local_experts=2, num_experts_per_tok=1),
    "T5ForConditionalGeneration": dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                       decoder_start_token_id=0),
}


def model_of(implementation, kind="LlamaForCausalLM"):
    import transformers
    for_transformers.register()
    made = getattr(transformers, kind, None)
    if not hasattr(sys.modules.get(getattr(made, "__module__", None)), "ALL_ATTENTION_FUNCTIONS"):
        pytest.skip(f"transformers {transformers.__version__} has no {kind} with an attention of one's choice")
    torch.manual_seed(0)
    model = made(made.config_class(attn_implementation=implementation, **MODELS[kind])).eval()
    for name, parameter in model.named_parameters():  # which begin as what has no effect
        if "sinks" in name or "relative_attention_bias" in name:
            nn.init.normal_(parameter)
    return model


PADDED = (torch.arange(2 * 14).reshape(2, 14) % 61 + 3, torch.tensor([[1] * 14, [0] * 5 + [1] * 9]))


@needs("transformers")
@pytest.mark.parametrize("kind", MODELS)
def test_models_give_what_eager_gives(kind, monkeypatch, device):
    tokens, mask = (t.to(device) for t in PADDED)
    decoder = {"decoder_input_ids": tokens[:, :7]} if kind.startswith("T5") else {}
    calls, results = [], []
    monkeypatch.setattr(heed, "attention", lambda *a, _real=heed.attention, **k: (calls.append(k), _real(*a, **k))[1])
    for implementation in "eager", "heed":
        assert not calls
        model = model_of(implementation, kind).to(device)
        logits = model(tokens, attention_mask=mask, **decoder).logits
        logits = logits if decoder else logits[mask.bool()]
        loss = logits.logsumexp(-1).mean()
        results.append((logits, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)))
    assert len(calls) == (6 if decoder else 2)  # one for each layer; of T5 two in the encoder, four in the decoder
    given = {"Gemma2ForCausalLM": "softcap", "GptOssForCausalLM": "sink", "T5ForConditionalGeneration": "bias"}.get(kind)
    assert given is None or all(call[given] is not None and (given != "softcap" or call[given] == 2.0) for call in calls)
    for got, want in zip(results[1], results[0]):
        assert (got is None) == (want is None)
        if got is not None:
            close(got, want, 1e-4)


@needs("transformers")
@pytest.mark.parametrize("kind,options,window", [
    ("MistralForCausalLM", {}, (3, 0)),
    ("MistralForCausalLM", {"attention_mask": PADDED[1]}, (3, 0)),
    ("LlamaForCausalLM", {"attention_mask": PADDED[1]}, (None, 0)),
    ("LlamaForCausalLM", {"attention_mask": torch.ones(2, 1, 14, 14, dtype=torch.bool)}, None),
    ("MistralForCausalLM", {"position_ids": torch.tensor([[*range(5), *range(9)]]), "use_cache": False}, None),
])
def test_only_the_band_of_a_causal_mask_is_computed(kind, options, window, monkeypatch):
    windows = []
    monkeypatch.setattr(heed, "attention",
                        lambda *a, _real=heed.attention, **k: (windows.append(k["window"]), _real(*a, **k))[1])
    model_of("heed", kind)(PADDED[0], **options)
    assert windows == [window] * 2


@needs("transformers")
def test_models_that_compute_attention_by_themselves_are_refused():
    import transformers
    for_transformers.register()
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4, attn_implementation="heed")
    with pytest.raises(ValueError, match="BloomConfig: these models compute attention by themselves"):
        transformers.BloomModel(config)(PADDED[0])


@needs("transformers")
@pytest.mark.parametrize("kind,options", [
    ("Splinter", dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)),
    ("PegasusX", dict(d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
                      encoder_ffn_dim=64, decoder_ffn_dim=64, block_size=4, num_global_tokens=2)),
])
def test_layers_that_do_not_know_whether_they_are_causal_have_a_mask(kind, options):
    import transformers
    for_transformers.register()
    inputs = {"input_ids": PADDED[0]} | ({"decoder_input_ids": PADDED[0]} if kind == "PegasusX" else {})
    results = []
    for implementation in "eager", "heed":
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(vocab_size=64, attn_implementation=implementation, **options)
        model = getattr(transformers, f"{kind}Model")(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, 0, 0.2)
        results.append(model(**inputs).last_hidden_state)
    close(results[1], results[0], 1e-4)


@needs("transformers")
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_with_a_cache(cache, device):
    tokens, mask = (t.to(device) for t in PADDED)
    options = dict(max_new_tokens=8, do_sample=False, attention_mask=mask, eos_token_id=None)
    if cache == "static":
        options.update(cache_implementation="static", disable_compile=True)
    texts = [model_of(implementation).to(device).generate(tokens, **options) for implementation in ("eager", "heed")]
    assert torch.equal(*texts)


@needs("transformers")
def test_a_model_compiles_to_one_graph(device):
    tokens, mask = (t.to(device) for t in PADDED)
    model = model_of("heed").to(device)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for more in {}, {"attention_mask": mask}:
        close(compiled(tokens, **more).logits[mask.bool()], model(tokens, **more).logits[mask.bool()])


# ---- diffusers -------------------------------------------------------------------------------------------------------

def attention_module(**changes):
    """What HeedAttnProcessor sees of a diffusers.models.attention_processor.Attention, and the plain computation."""
    torch.manual_seed(0)
    attn = types.SimpleNamespace(
        heads=4, spatial_norm=None, group_norm=None, norm_cross=None, norm_q=None, norm_k=None, residual_connection=False,
        rescale_output_factor=1.0, added_kv_proj_dim=None, scale=8**-0.5,
        to_q=nn.Linear(32, 32), to_k=nn.Linear(32, 32), to_v=nn.Linear(32, 32),
        to_out=nn.ModuleList([nn.Linear(32, 32), nn.Dropout(0.0)]),
        prepare_attention_mask=lambda mask, keys, batch: mask.repeat_interleave(4, 0))
    for name, value in changes.items():
        setattr(attn, name, value)
    return attn


def plain(attn, x, context, mask=None):
    heads = lambda t: t.unflatten(-1, (4, 8)).transpose(1, 2)
    o = F.scaled_dot_product_attention(heads(attn.to_q(x)), heads(attn.to_k(context)), heads(attn.to_v(context)), mask)
    return attn.to_out[0](o.transpose(1, 2).flatten(2))


def test_processor_self_and_cross_attention():
    attn, x, text = attention_module(), torch.randn(2, 10, 32), torch.randn(2, 7, 32)
    close(for_diffusers.HeedAttnProcessor()(attn, x), plain(attn, x, x))
    close(for_diffusers.HeedAttnProcessor()(attn, x, text), plain(attn, x, text))
    mask = torch.zeros(2, 1, 7).masked_fill(torch.rand(2, 1, 7) < 0.4, -10000.0)
    close(for_diffusers.HeedAttnProcessor()(attn, x, text, mask), plain(attn, x, text, mask[:, :, None]))


def test_processor_images_norms_and_residual():
    attn = attention_module(group_norm=nn.GroupNorm(4, 32), residual_connection=True, rescale_output_factor=2.0)
    image = torch.randn(2, 32, 3, 5)
    x = attn.group_norm(image.flatten(2)).transpose(1, 2)
    want = (plain(attn, x, x).transpose(1, 2).reshape(image.shape) + image) / 2
    close(for_diffusers.HeedAttnProcessor()(attn, image), want)


@pytest.mark.parametrize("attn", [attention_module(added_kv_proj_dim=32), attention_module(is_causal=True), nn.Linear(32, 32)])
def test_processor_refuses_what_is_more_than_it_computes(attn):
    with pytest.raises(ValueError, match="attn: is a .* with more to it"):
        for_diffusers.HeedAttnProcessor()(attn, torch.randn(2, 10, 32))


def test_backend_takes_diffusers_order_and_masks():
    q, k, v = (t.transpose(1, 2) for t in qkv(keys=9))
    want = lambda mask=None, **more: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), mask, **more)
    close(for_diffusers.attention_backend(q, k, v).transpose(1, 2), want())
    mask = torch.rand(2, 9) < 0.7
    mask[:, 0] = True
    close(for_diffusers.attention_backend(q, k, v, attn_mask=mask).transpose(1, 2), want(mask[:, None, None]))
    o, lse = for_diffusers.attention_backend(q, k, v, attn_mask=mask, return_lse=True)
    scores = (q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * 0.25).masked_fill(~mask[:, None, None], float("-inf"))
    close(o.transpose(1, 2), want(mask[:, None, None]))
    close(lse.transpose(1, 2), scores.logsumexp(-1))
    for more in {}, {"return_lse": True}:  # as PyTorch: the first row stands at the first key
        o = for_diffusers.attention_backend(q, k, v, is_causal=True, **more)
        close((o[0] if more else o).transpose(1, 2), want(is_causal=True))
    with pytest.raises(ValueError, match="context parallelism"):
        for_diffusers.attention_backend(q, k, v, _parallel_config=object())


@needs("diffusers")
@pytest.mark.parametrize("more", [{}, {"cross_attention_dim": 24}, {"norm_num_groups": 4, "residual_connection": True},
                                  {"qk_norm": "layer_norm"}, {"scale_qk": False}])
def test_processor_in_the_real_attention(more):
    from diffusers.models.attention_processor import Attention
    torch.manual_seed(0)
    attn = Attention(query_dim=32, heads=4, dim_head=8, **more)
    x, text = torch.randn(2, 10, 32), torch.randn(2, 7, 24) if "cross_attention_dim" in more else None
    mask = torch.zeros(2, 1, 7 if text is not None else 10).masked_fill_(torch.rand(2, 1, 1) < 0.5, -1.0)
    mask[..., 3:] = -10000.0
    results = []
    for processor in attn.processor, for_diffusers.HeedAttnProcessor():
        attn.set_processor(processor)
        results += [attn(x, text), attn(x, text, mask)]
    close(results[2], results[0])
    close(results[3], results[1])


@needs("diffusers")
def test_backend_can_be_chosen_by_name():
    from diffusers.models import attention_dispatch
    for_diffusers.register()
    for_diffusers.register()
    q, k, v = (t.transpose(1, 2) for t in qkv())
    want = attention_dispatch.dispatch_attention_fn(q, k, v, backend="native")
    close(attention_dispatch.dispatch_attention_fn(q, k, v, backend="heed"), want)
    calls = []
    attention_dispatch._AttentionBackendRegistry.register(attention_dispatch.AttentionBackendName("heed"))(
        lambda query, key, value: calls.append(1) or for_diffusers.attention_backend(query, key, value))
    with attention_dispatch.attention_backend("heed"):
        close(attention_dispatch.dispatch_attention_fn(q, k, v), want)
    for_diffusers.register()
    assert calls == [1]
    assert attention_dispatch.AttentionBackendName("heed").value == "heed"
    assert [name.value for name in attention_dispatch.AttentionBackendName].count("heed") == 1


@needs("diffusers")
def test_a_model_can_be_set_to_the_backend():
    import diffusers
    for_diffusers.register()
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8)).eval()
    given = dict(hidden_states=torch.randn(1, 16, 4), encoder_hidden_states=torch.randn(1, 5, 32),
                 pooled_projections=torch.randn(1, 32), timestep=torch.tensor([1.0]), img_ids=torch.zeros(16, 3),
                 txt_ids=torch.zeros(5, 3))
    with torch.no_grad():
        want = model(**given).sample
        model.set_attention_backend("heed")
        close(model(**given).sample, want)


# ---- torch.nn.functional.scaled_dot_product_attention ----------------------------------------------------------------

@pytest.fixture
def activated(monkeypatch):
    if not hasattr(torch.nn.attention, "restore_flash_attention_impl"):
        pytest.skip("this torch has no registry of flash attentions")
    calls = []
    monkeypatch.setattr(for_sdpa.heed, "attention",
                        lambda *a, _real=heed.attention, **k: (calls.append(1), _real(*a, **k))[1])
    for_sdpa.register()
    yield calls
    if torch.nn.attention.current_flash_attention_impl():
        torch.nn.attention.restore_flash_attention_impl()


def results(q, k, v, **options):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        o = F.scaled_dot_product_attention(*leaves, **options)
    return o, *torch.autograd.grad(o.float().sin().sum(), leaves)


@pytest.mark.parametrize("rows,keys,causal,masked", [(12, 12, False, None), (12, 12, True, None), (12, 9, False, None),
                                                     (5, 9, True, None), (9, 5, True, None), (12, 9, False, "bool"),
                                                     (12, 9, False, "float")])
def test_sdpa_is_heeds_while_activated(activated, rows, keys, causal, masked, device):
    if device == "cuda" and (masked or causal and rows != keys):
        pytest.skip("PyTorch's flash attention for CUDA does not take this")
    q, k, v = (t.to(device, torch.bfloat16 if device == "cuda" else None) for t in qkv(rows=rows, keys=keys))
    mask = None
    if masked:
        mask = torch.rand(rows, keys) < 0.7
        mask[:, 0] = True
        mask = mask if masked == "bool" else torch.randn(2, 1, rows, keys)
    options = {"is_causal": causal, "attn_mask": mask}
    want = results(q, k, v, **options)
    assert "heed" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("heed")
    got = results(q, k, v, **options)
    assert activated == [1]
    for a, b in zip(got, want):
        close(a, b, 2e-5 if device == "cpu" else 3e-2)
    torch.nn.attention.restore_flash_attention_impl()
    again = results(q, k, v, **options)
    assert activated == [1] and all(torch.equal(a, b) for a, b in zip(again, want))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3), (0, 1, 3, 2)])
@pytest.mark.parametrize("kind", ["CPU", "CUDA"])
def test_sdpa_has_the_strides_that_compiled_programs_count_on(kind, order):
    x = torch.randn([(2, 3, 5, 8)[i] for i in order]).permute([order.index(i) for i in range(4)])
    ours = for_sdpa.OPERATORS[kind]
    def strides(forward, backward, x):
        o, lse, *more = forward(x, x, x)
        more = [*more[:4], 0.0, False, *more[4:6]] if more else [0.0, False]
        return [t.stride() for t in (o, lse, *backward(o, x, x, x, o, lse, *more))]
    theirs = [getattr(torch.ops.aten, name) for name in ours]
    assert strides(*ours.values(), x) == strides(*theirs, x.to("meta"))


@pytest.mark.filterwarnings("ignore:.*(Flash attention|fused kernels|ttention kernel not)")
def test_what_other_backends_compute_stays_theirs(activated, device):
    """The table in docs/python/pytorch.md."""
    q, k, v = (t.to(device, torch.bfloat16 if device == "cuda" else None) for t in qkv(heads_k=2))
    sdpa, mask = F.scaled_dot_product_attention, torch.zeros(12, 12, device=device, dtype=q.dtype)
    heeds = [lambda: sdpa(q, k, v, enable_gqa=True)]
    theirs = [lambda: sdpa(k, k, v, attn_mask=mask.clone().requires_grad_())]
    if device == "cpu":
        heeds += [lambda: sdpa(k, k, v, attn_mask=mask), lambda: sdpa(k.double(), k.double(), v.double()),
                  lambda: sdpa(k[0], k[0], v[0])]
        theirs += [lambda: sdpa(k, k, v, dropout_p=0.5), lambda: sdpa(k, k, v[..., :8])]
    else:
        theirs += [lambda: sdpa(k, k, v, attn_mask=mask), lambda: sdpa(k.float(), k.float(), v.float()),
                   lambda: sdpa(k[0], k[0], v[0])]
    torch.nn.attention.activate_flash_attention_impl("heed")
    for call in heeds:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            call()
        assert activated.pop() == 1
    for call in theirs:
        call()
        assert not activated
        with pytest.raises(RuntimeError), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            call()


def test_sdpa_with_dropout_repeats_with_the_seed(activated, device):
    q, k, v = (t.to(device, torch.bfloat16 if device == "cuda" else None) for t in qkv())
    torch.nn.attention.activate_flash_attention_impl("heed")
    if device == "cpu":  # PyTorch itself computes dropout on the CPU another way; the operator says no
        with pytest.raises(ValueError, match="dropout_p is 0.5"):
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.5)
        return
    draws = []
    for seed in 1, 1, 2:
        torch.manual_seed(seed)
        draws.append(results(q, k, v, dropout_p=0.5))
    assert all(torch.equal(a, b) for a, b in zip(draws[0], draws[1])) and not torch.equal(draws[0][0], draws[2][0])
