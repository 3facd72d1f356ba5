#!/usr/bin/env bash
# Makes what tests/checkpoint/version_1_run holds: a run of `bifocal train` on two ranks, cut down to
# its checkpoint in the middle of stage 2, with its teacher and its data.
#   tests/checkpoint/make_version_1_run.sh DIRECTORY
# The committed one stays as it is: later programs must read it. Needs build/cpu and h5py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
bifocal=$root/build/cpu/bifocal
machine=$root/data/register-machine/teacher
if (($# != 1)); then
  echo "[make_version_1_run] wanted one new directory, got $# arguments" >&2
  exit 2
fi
mkdir "$1"
cd "$1"
export OMP_NUM_THREADS=1

"$bifocal" synth register-machine --count 40 --max-steps 6 --seed 1 --output problems.jsonl
"$bifocal" tokenize problems.jsonl --tokenizer "$machine/tokenizer.json" --output data

mkdir shape
cat > shape/config.json <<'EOF'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 128, "hidden_size": 16,
 "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
 "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
 "max_position_embeddings": 1024, "tie_word_embeddings": true}
EOF
"$bifocal" pretrain --run.directory pretrain --student.init shape --student.preset keep \
  --data.train data --data.row_tokens 64 --data.rows_per_step 2 --pretrain.steps 200 \
  --pretrain.rate 1e-2 --run.log_every 50
"$bifocal" export pretrain --output teacher

mpirun --oversubscribe -n 2 "$bifocal" train --run.directory run --teacher.path teacher \
  --student.budget 24 --mesh.data 1 --mesh.sequence 0 --data.train data --data.row_tokens 64 \
  --data.rows_per_step 6 --align.steps 2 --distill.steps 6 --distill.rate 1e-3 --checkpoint.every 4

rm -r problems.jsonl shape pretrain teacher/README.md run/events run/run.lock run/checkpoints/step_8
echo step_4 > run/checkpoints/latest
# What every tensor must read as, by a library that is not ours.
python3 - > run/values.sha256 <<'EOF'
import hashlib
import h5py

with h5py.File("run/checkpoints/step_4/checkpoint.h5") as file:
    for name in sorted(file):
        print(hashlib.sha256(file[name][:].tobytes()).hexdigest(), name)
EOF
