refuse() { echo "the environment cannot be entered: $1" >&2; exit 64; }
cd /shared/baton || refuse folder
export TMPDIR="/tmp"
[ -w "$TMPDIR" ] || refuse 'scratch /tmp'
export OMP_NUM_THREADS=1
exec srun --nodes=1 --ntasks=1 --overlap --nodelist=n2 --cpus-per-task=64 --cpu-bind=cores --container-image="/shared/cuda.sqsh" --container-mounts="/shared/baton:/shared/baton","/tmp:/tmp","/scratch:/scratch" --container-workdir=/shared/baton python -m engines.workers.ray_node
