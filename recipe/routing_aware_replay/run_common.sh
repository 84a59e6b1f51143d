#!/usr/bin/env bash
# Shared by all arms: run_common.sh ARM MODE [hydra overrides]. Not run on a GPU.
#
#   MODEL_PATH, TRAIN_FILES, VAL_FILES   a Hugging Face MoE and verl's parquet files (needed)
#   NNODES, GPUS_PER_NODE                machines, 1 x 8 by default; TP, PP, EP, ROLLOUT_TP their layout
#   SCORES                               file of expert scores, for arms that rank experts
#   RUN_DIR                              checkpoints and the policy that was run, of one arm; on a disk that all nodes see
#   PYTHON                               interpreter that has verl and rar_lib
set -euo pipefail

recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
arm=${1:?expected an arm}
mode=${2:?expected disabled, R2 or R3}
shift 2

: "${MODEL_PATH:?expected the path of a Hugging Face MoE checkpoint}"
: "${TRAIN_FILES:?expected a parquet file of training prompts}"
: "${VAL_FILES:?expected a parquet file of validation prompts}"
run_dir=${RUN_DIR:-$PWD/runs/routing_aware_replay/$arm}
mkdir -p "$run_dir"
run_dir=$(cd "$run_dir" && pwd)  # workers have another working directory

# verl continues from the checkpoint that it finds in the folder, whichever arm wrote it.
policy=$recipe/policies/$arm.json
refuse() {
  echo "run_common.sh: $run_dir: $1; set RUN_DIR to a folder of its own" >&2
  exit 1
}
if [ -e "$run_dir/arm" ]; then
  found=$(cat "$run_dir/arm")
  [ "$found" = "$arm" ] || refuse "expected a run of arm $arm, found one of arm $found"
elif compgen -G "$run_dir/global_step_*" > /dev/null; then
  refuse "expected a run of arm $arm, found a checkpoint and no file arm that says whose it is"
fi
if [ -e "$run_dir/policy.json" ] && ! cmp -s "$policy" "$run_dir/policy.json"; then
  refuse "expected the policy of $policy, found another in policy.json"
fi
echo "$arm" > "$run_dir/arm"

replay=()
if [ "$mode" != disabled ]; then
  # The policy lies with the run; a path inside it is relative to it.
  cp "$policy" "$run_dir/policy.json"
  if grep -q '"scores"' "$run_dir/policy.json"; then
    : "${SCORES:?expected a file of expert scores, which arm $arm ranks (README.md)}"
    [ "$SCORES" -ef "$run_dir/scores.safetensors" ] || cp "$SCORES" "$run_dir/scores.safetensors"
  fi
  replay=(
    actor_rollout_ref.model.external_lib=rar_lib.integrations.verl
    "actor_rollout_ref.actor.megatron.router_replay.replay_file=$run_dir/policy.json"
  )
fi
capture=False
if [ "$mode" = R3 ]; then capture=True; fi

exec "${PYTHON:-python3}" -m verl.trainer.main_ppo \
  --config-path="$recipe/config" --config-name=routing_aware_replay \
  "actor_rollout_ref.model.path=$MODEL_PATH" \
  actor_rollout_ref.model.use_remove_padding=True \
  "data.train_files=$TRAIN_FILES" \
  "data.val_files=$VAL_FILES" \
  "actor_rollout_ref.actor.megatron.router_replay.mode=$mode" \
  "actor_rollout_ref.rollout.enable_rollout_routing_replay=$capture" \
  "${replay[@]}" \
  "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${TP:-1}" \
  "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=${PP:-1}" \
  "actor_rollout_ref.actor.megatron.expert_model_parallel_size=${EP:-8}" \
  "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=${TP:-1}" \
  "actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=${PP:-1}" \
  "actor_rollout_ref.ref.megatron.expert_model_parallel_size=${EP:-8}" \
  "actor_rollout_ref.rollout.tensor_model_parallel_size=${ROLLOUT_TP:-4}" \
  "trainer.nnodes=${NNODES:-1}" \
  "trainer.n_gpus_per_node=${GPUS_PER_NODE:-8}" \
  "trainer.experiment_name=$arm" \
  "trainer.default_local_dir=$run_dir" \
  "$@"
