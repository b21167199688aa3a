#!/bin/bash
#SBATCH --job-name=baton:train:0123456789abcdef-step000006
#SBATCH --comment=baton:train:0123456789abcdef-step000006
#SBATCH --partition=ascend
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=4
#SBATCH --mem=16384M
#SBATCH --gres=npu:2
#SBATCH --time=01:00:00
#SBATCH --signal=B:USR2@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=results/.slurm/%j.log

refuse() { echo "the environment cannot be entered: $1" >&2; exit 64; }
cd /shared/baton || refuse folder
export TMPDIR="/tmp"
[ -w "$TMPDIR" ] || refuse 'scratch /tmp'
source /usr/local/Ascend/ascend-toolkit/set_env.sh
source "/shared/ascend"/bin/activate || refuse venv
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
exec python -m workflow.stages train --plan results/demo/plan-0123.json --id 0123456789abcdef --step 20
