exec srun --nodes=1 --ntasks=1 --overlap --nodelist=n2 --cpus-per-task=64 --cpu-bind=cores bash -c 'refuse() { echo "the environment cannot be entered: $1" >&2; exit 64; }
cd /shared/baton || refuse folder
export TMPDIR="/tmp"
[ -w "$TMPDIR" ] || refuse '"'"'scratch /tmp'"'"'
type module >/dev/null 2>&1 || source /etc/profile
module load apptainer || refuse '"'"'module apptainer'"'"'
export OMP_NUM_THREADS=1
exec apptainer exec --nv --bind "/shared/baton" --bind "/tmp" --bind "$SCRATCH" --pwd /shared/baton --cleanenv "/shared/cuda.sif" python -m engines.workers.ray_node
'
