"""Plans training steps of Hugging Face's Flax models.

    python3.11 -m venv flax && flax/bin/pip install 'transformers<4.50' flax optax jax==0.10.2
    python -m benchmarks.flax_models --python flax/bin/python [--only bart marian] [--devices 8] [--prove]

A step has dropout, AdamW with masked decay and clipped gradients, and donates its state. The given Python lowers it,
without this project installed; its text is planned here. Prints the step, the gap, and CPU seconds of planning and of
lowering; with --prove, the difference between XLA's collectives and the plan's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

#: Of each model: class and configuration of `transformers`, changes of its defaults, and the length of the input: of a
#: sequence, of both sequences of an encoder-decoder model, or of an image's sides.
BATCH = 32
LANGUAGE: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "gptneo": (
        "FlaxGPTNeoForCausalLM", "GPTNeoConfig",
        {"hidden_size": 768, "num_layers": 12, "num_heads": 12, "attention_types": [[["global", "local"], 6]],
         "max_position_embeddings": 1024}, 512,
    ),
    "gptj": ("FlaxGPTJForCausalLM", "GPTJConfig", {"n_embd": 1024, "n_layer": 12, "n_head": 16}, 512),
    "opt": ("FlaxOPTForCausalLM", "OPTConfig", {}, 512),
    "llama": (
        "FlaxLlamaForCausalLM", "LlamaConfig",
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
         "max_position_embeddings": 1024}, 512,
    ),
    "mistral": (
        "FlaxMistralForCausalLM", "MistralConfig",
        {"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 8, "num_attention_heads": 16,
         "num_key_value_heads": 4, "sliding_window": 256}, 512,
    ),
    "gemma": (
        "FlaxGemmaForCausalLM", "GemmaConfig",
        {"vocab_size": 64000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8,
         "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}, 512,
    ),
    "bloom": ("FlaxBloomForCausalLM", "BloomConfig", {"hidden_size": 1024, "n_layer": 12, "n_head": 16}, 512),
    "albert": (
        "FlaxAlbertForMaskedLM", "AlbertConfig",
        {"hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}, 512,
    ),
    "distilbert": ("FlaxDistilBertForMaskedLM", "DistilBertConfig", {}, 512),
    "roberta": ("FlaxRobertaForMaskedLM", "RobertaConfig", {"max_position_embeddings": 514}, 512),
}  # fmt: skip
SEQUENCE_TO_SEQUENCE: dict[str, tuple[str, str, dict[str, Any], tuple[int, int]]] = {
    "bart": (
        "FlaxBartForConditionalGeneration", "BartConfig",
        {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
         "encoder_attention_heads": 12, "decoder_attention_heads": 12}, (512, 128),
    ),
    "pegasus": (
        "FlaxPegasusForConditionalGeneration", "PegasusConfig",
        {"d_model": 768, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072,
         "encoder_attention_heads": 12, "decoder_attention_heads": 12}, (512, 128),
    ),
    "marian": (
        "FlaxMarianMTModel", "MarianConfig",
        {"d_model": 512, "encoder_layers": 6, "decoder_layers": 6, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
         "encoder_attention_heads": 8, "decoder_attention_heads": 8, "vocab_size": 58101, "pad_token_id": 58100},
        (256, 256),
    ),
}  # fmt: skip
VISION: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "vit": ("FlaxViTForImageClassification", "ViTConfig", {}, 224),
    "beit": ("FlaxBeitForImageClassification", "BeitConfig", {"num_hidden_layers": 8}, 224),
    "dinov2": ("FlaxDinov2ForImageClassification", "Dinov2Config", {"num_hidden_layers": 8}, 224),
    "resnet": ("FlaxResNetForImageClassification", "ResNetConfig", {}, 224),
    "regnet": ("FlaxRegNetForImageClassification", "RegNetConfig", {}, 224),
}
NAMES = (*LANGUAGE, *SEQUENCE_TO_SEQUENCE, *VISION)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", help="one that has transformers, flax, optax and jax")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="MODEL")
    parser.add_argument("--devices", type=int, choices=(8, 16), default=8, help="A100 of the suite's machines")
    parser.add_argument("--prove", action="store_true", help="compare XLA's collectives with the plan's")
    parser.add_argument("--lower", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.lower:
        for name in arguments.only:
            _lower(name, Path(arguments.lower))
        return
    if not arguments.python:
        parser.error("--python is missing")
    with tempfile.TemporaryDirectory(prefix="flax-models-") as folder:
        for name in arguments.only:
            command = [arguments.python, __file__, "--lower", folder, "--only", name]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            print(_plan_text(name, Path(folder), arguments.devices, prove=arguments.prove), flush=True)


def _plan_text(name: str, folder: Path, devices: int, *, prove: bool) -> str:
    """Plan a model's text; returns the line to print."""
    import shardwright
    from benchmarks.planner.suite import cluster_json, entries
    from shardwright.clusters.cluster import Cluster

    text, lower_s = (folder / f"{name}.hlo").read_text(), json.loads((folder / f"{name}.json").read_text())
    machine = next(entry.machine for entry in entries() if entry.devices == devices)
    cluster = Cluster.from_json(cluster_json(devices, machine))
    started_s = time.process_time()
    plan = shardwright.plan(text, cluster, stages=1, cache=False)
    planning_s = time.process_time() - started_s
    line = f"{name:11} {plan.mesh!s:38} {plan.cost.step_s * 1e3:7.2f} ms  gap {plan.cost.gap:6.2%}"
    line += f"  {planning_s:6.1f} s of CPU, lowering {lower_s:4.1f}"
    if prove:
        proof = plan.prove()
        line += f"  collectives {'hold' if proof.holds else 'DIFFER'}, {proof.difference:.2%} apart"
    return line


# ---- in the other Python ------------------------------------------------------


def _lower(name: str, folder: Path) -> None:
    """Lower one model's step; writes its text and the CPU seconds."""
    import jax

    step, state, batch = _build_step(name)
    started_s = time.process_time()
    text = jax.jit(step, donate_argnums=0).lower(state, batch).as_text("hlo", debug_info=True)
    (folder / f"{name}.json").write_text(json.dumps(time.process_time() - started_s))
    (folder / f"{name}.hlo").write_text(text)


def _build_step(name: str) -> tuple[Any, Any, Any]:
    """The training step of a model, and shapes of its state and its batch."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import traverse_util

    loss, variables, batch = _build_loss(name)
    statistics = variables.get("batch_stats")
    parameters = variables["params"] if statistics is not None else variables

    def decays(tree: Any) -> Any:
        return traverse_util.path_aware_map(lambda path, _: path[-1] not in ("bias", "scale"), tree)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01, mask=decays))

    def step(state: Any, batch: Any) -> Any:
        parameters, statistics, moments, key = state
        key, dropout_key = jax.random.split(key)
        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(
            parameters, statistics, batch, dropout_key
        )
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), statistics, moments, key), value

    moments = jax.eval_shape(optimizer.init, parameters)
    return step, (parameters, statistics, moments, jax.ShapeDtypeStruct((2,), jnp.uint32)), batch


def _build_loss(name: str) -> tuple[Any, Any, Any]:
    """(loss, shapes of the variables, shapes of a batch) of a model.

    loss: (parameters, batch statistics, batch, key) -> (loss, batch statistics).
    """
    import jax
    import transformers

    (maker, config, changes, size) = ({**LANGUAGE, **SEQUENCE_TO_SEQUENCE, **VISION})[name]
    model = getattr(transformers, maker)(getattr(transformers, config)(**changes), _do_init=False)
    input_shape = (1, size, size, 3) if name in VISION else (1, size[0] if isinstance(size, tuple) else size)
    variables = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), input_shape))
    if name in VISION:
        return (
            _build_vision_loss(model, variables),
            variables,
            {"image": _batch_shape(3, size, size, kind="float32"), "labels": _batch_shape()},
        )
    tokens, labels = size if isinstance(size, tuple) else (size, size)
    batch = {"input_ids": _batch_shape(tokens), "attention_mask": _batch_shape(tokens)}
    if name in SEQUENCE_TO_SEQUENCE:
        batch |= {
            name_of_input: _batch_shape(labels) for name_of_input in ("decoder_input_ids", "decoder_attention_mask")
        }
    training = {"deterministic": False} if name == "opt" else {"train": True}
    return _build_token_loss(model, training), variables, {**batch, "labels": _batch_shape(labels)}


def _build_token_loss(model: Any, training: dict[str, bool]) -> Any:
    def loss(parameters: Any, statistics: Any, batch: Any, key: Any) -> Any:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        result = model(**inputs, params=parameters, dropout_rng=key, **training)
        return _cross_entropy(result.logits, batch["labels"]), statistics

    return loss


def _build_vision_loss(model: Any, variables: Any) -> Any:
    def loss(parameters: Any, _: Any, batch: Any, key: Any) -> Any:
        result = model(batch["image"], params=parameters, dropout_rng=key, train=True)
        return _cross_entropy(result.logits, batch["labels"]), None

    def loss_with_statistics(parameters: Any, statistics: Any, batch: Any, _: Any) -> Any:
        model_variables = {"params": parameters, "batch_stats": statistics}
        result, changed = model(batch["image"], params=model_variables, train=True)
        return _cross_entropy(result.logits, batch["labels"]), changed["batch_stats"]

    return loss_with_statistics if "batch_stats" in variables else loss


def _cross_entropy(logits: Any, labels: Any) -> Any:
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), labels).mean()


def _batch_shape(*shape: int, kind: str = "int32") -> Any:
    import jax

    return jax.ShapeDtypeStruct((BATCH, *shape), kind)


if __name__ == "__main__":
    main()
