#!/usr/bin/env bash
# Times of checkpoints: a model of random weights, a few short steps with a save among them, then the
# same command again, which loads it. What it prints: docs/results/checkpoints.md.
#   docs/results/checkpoints.sh SHAPE DEVICE [RANKS] [ASYNCHRONOUS]
# SHAPE: 170m (2 GB of weights and moments) or 4b (Qwen3-4B's, 48 GB, of which the disk holds one).
# DEVICE: cpu or cuda, whose program lies in build/cpu or build/cuda. Writes below runs/checkpoints.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
shape=${1:?wanted a shape: 170m or 4b}
device=${2:?wanted a device: cpu or cuda}
ranks=${3:-1}
asynchronous=${4:-true}
case $shape in
  170m)
    sizes='"vocab_size": 128, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 11,
      "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64'
    steps=14 # saves after 4, 8 and 12
    ;;
  4b)
    sizes='"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
      "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128'
    steps=7
    ;;
  *)
    echo "[checkpoints.sh] wanted the shape 170m or 4b, got $shape" >&2
    exit 2
    ;;
esac

out=runs/checkpoints
rm -rf "$out"
mkdir -p "$out/shape"
cat > "$out/shape/config.json" <<EOF
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", $sizes, "hidden_act": "silu",
 "rms_norm_eps": 1e-06, "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": true}
EOF

pretrain() { # STEPS
  BIFOCAL=build/$device/bifocal launch/local.sh "$ranks" pretrain --run.directory "$out/run" --run.device "$device" \
    --student.init "$out/shape" --student.preset keep \
    --data.train tests/checkpoint/version_1_run/data --data.row_tokens 64 --data.rows_per_step 2 \
    --pretrain.steps "$1" --checkpoint.every 4 --checkpoint.keep 1 --checkpoint.stage_ends false \
    --checkpoint.asynchronous "$asynchronous"
}
pretrain "$steps" > "$out/log"
pretrain $((steps + 1)) >> "$out/log"
grep -E '^(checkpoint of|resumed from)' "$out/log"
ls -l "$out"/run/checkpoints/step_*
# Seconds of each step, for those beside a save.
sed -nE 's/^\{"step":([0-9]+),.*"grad_norm".*"seconds":([0-9.]+),.*/step \1: \2 s/p' "$out/run/metrics.jsonl"
rm -r "$out/run/checkpoints"
