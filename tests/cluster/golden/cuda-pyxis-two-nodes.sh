#!/bin/bash
#SBATCH --job-name=baton:train:0123456789abcdef-step000020
#SBATCH --comment=baton:train:0123456789abcdef-step000020
#SBATCH --partition=gpu
#SBATCH --account=proj42
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --mem=491520M
#SBATCH --gres=gpu:a100:4
#SBATCH --time=1-00:00:00
#SBATCH --signal=B:USR2@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=results/.slurm/%j.log

refuse() { echo "the environment cannot be entered: $1" >&2; exit 64; }
cd /shared/baton || refuse folder
export TMPDIR="/tmp"
[ -w "$TMPDIR" ] || refuse 'scratch /tmp'
export OMP_NUM_THREADS=1
exec srun --nodes=1 --ntasks=1 --overlap --nodelist=n1 --cpus-per-task=64 --cpu-bind=cores --container-image="/shared/cuda.sqsh" --container-mounts="/shared/baton:/shared/baton","/tmp:/tmp","/scratch:/scratch" --container-workdir=/shared/baton python -m workflow.stages train --plan results/demo/plan-0123.json --id 0123456789abcdef --step 20
