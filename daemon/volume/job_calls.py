"""gRPC calls about background jobs: check the request, run it, convert the answer."""

from sealane.daemon.volume.jobs import job_kind, job_message, job_order, job_rate
from sealane.daemon.volume.kept_jobs import VolumeJobs
from sealane.protocol.v1 import storage_pb2


async def start_job(jobs: VolumeJobs, start: storage_pb2.JobStart) -> storage_pb2.VolumeJob:
    """Start a job; errors of `VolumeJobs.start`, and UsageError `volume.job.kind` or `.rate`."""
    job = await jobs.start(job_kind(start.kind), bytes_per_second=job_rate(start.bytes_per_second))
    return job_message(job)


async def change_job(jobs: VolumeJobs, change: storage_pb2.JobChange) -> storage_pb2.VolumeJob:
    """Change a job; errors of `VolumeJobs.change`, and UsageError for an invalid request.

    The latter: `volume.job.kind`, `volume.job.order`, `volume.job.rate`.
    """
    rate = job_rate(change.bytes_per_second) if change.HasField("bytes_per_second") else None
    job = await jobs.change(
        job_kind(change.kind), order=job_order(change.order), bytes_per_second=rate
    )
    return job_message(job)
