exec srun --nodes=1 --ntasks=1 --overlap --nodelist=n2 --cpus-per-task=192 --cpu-bind=cores bash -c 'refuse() { echo "the environment cannot be entered: $1" >&2; exit 64; }
cd /shared/baton || refuse folder
export TMPDIR="/tmp"
[ -w "$TMPDIR" ] || refuse '"'"'scratch /tmp'"'"'
source /usr/local/Ascend/ascend-toolkit/set_env.sh
source "/shared/venv"/bin/activate || refuse venv
export TORCH_DEVICE_BACKEND_AUTOLOAD=0
export OMP_NUM_THREADS=1
exec python -m engines.workers.ray_node
'
