//! Binding of a host's I/O queue.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::Duration;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBaseException;
use pyo3::prelude::*;
use sealane_engine::storage::initiator::{HostVolumeQueue, Transfer, TransferBuffer};
use sealane_proto::nvme::host_queue::HostLimits;
use sealane_proto::nvme::operation::LbaRange;
use sealane_proto::nvme::pdu::Digests;

use crate::storage::{duplicate, invalid, transfer_error};

/// Registers everything in this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<HostQueue>()
}

/// A connected I/O queue of a host, as returned by `ConnectedQueue.describe()`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct HostQueueDescription {
    descriptor: i32,
    queue_depth: u16,
    h2c_data_max: usize,
    transfer_max: usize,
    in_capsule_max: usize,
    header_digest: bool,
    data_digest: bool,
    block_bytes: usize,
    nsid: u32,
}

impl HostQueueDescription {
    /// A duplicate of the queue's socket, which Python owns and will close.
    pub fn socket(&self) -> PyResult<OwnedFd> {
        duplicate(self.descriptor)
    }

    /// The limits that the queue was connected with.
    pub fn limits(&self) -> HostLimits {
        HostLimits {
            queue_depth: self.queue_depth,
            h2c_data_max: self.h2c_data_max,
            transfer_max: self.transfer_max,
            in_capsule_max: self.in_capsule_max,
            block_bytes: self.block_bytes,
            nsid: self.nsid,
            digests: Digests { header: self.header_digest, data: self.data_digest },
        }
    }
}

/// A Python buffer, held while a transfer uses it.
///
/// Its owner may change the bytes meanwhile, which makes the contents undefined but does no other
/// harm: the bytes are only copied, never borrowed.
#[derive(Debug)]
struct CallerBuffer {
    export: PyBuffer<u8>,
}

impl CallerBuffer {
    fn readable(export: PyBuffer<u8>) -> PyResult<Box<dyn TransferBuffer>> {
        if !export.is_c_contiguous() {
            return Err(invalid("the buffer must be contiguous"));
        }
        Ok(Box::new(Self { export }))
    }

    fn writable(export: PyBuffer<u8>) -> PyResult<Box<dyn TransferBuffer>> {
        if export.readonly() {
            return Err(invalid("the buffer must be contiguous and writable"));
        }
        Self::readable(export)
    }

    /// Address of `length` bytes at `offset`; `None` if they aren't all inside.
    fn place(&self, offset: usize, length: usize) -> Option<*mut u8> {
        let is_inside = offset.checked_add(length)? <= self.export.len_bytes();
        // SAFETY: the sum is inside the exported memory, or one past its end.
        is_inside.then(|| unsafe { self.export.buf_ptr().cast::<u8>().add(offset) })
    }
}

impl TransferBuffer for CallerBuffer {
    fn bytes(&self) -> usize {
        self.export.len_bytes()
    }

    fn copy_to(&self, offset: usize, into: &mut [u8]) {
        if let Some(place) = self.place(offset, into.len()) {
            // SAFETY: the export keeps the memory valid, `place` checked the bounds, and `into` is
            // the engine's own memory, so the two don't overlap.
            unsafe { std::ptr::copy_nonoverlapping(place, into.as_mut_ptr(), into.len()) };
        }
    }

    fn copy_from(&mut self, offset: usize, data: &[u8]) {
        if let Some(place) = self.place(offset, data.len()) {
            // SAFETY: as above; only buffers from `writable` are given to transfers that read from
            // the device.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), place, data.len()) };
        }
    }
}

/// A plain I/O queue of a host.
#[pyclass(frozen, module = "sealane._native")]
struct HostQueue {
    queue: HostVolumeQueue,
}

impl HostQueue {
    fn start(&self, py: Python<'_>, lba: u64, transfer: Transfer) -> PyResult<u64> {
        py.detach(|| self.queue.start(lba, transfer)).map_err(transfer_error)
    }
}

#[pymethods]
impl HostQueue {
    #[new]
    #[pyo3(signature = (queue, *, io_bytes, timeout_seconds))]
    fn new(queue: HostQueueDescription, io_bytes: usize, timeout_seconds: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(timeout_seconds).map_err(invalid)?;
        let queue = HostVolumeQueue::new(queue.socket()?, queue.limits(), io_bytes, timeout)?;
        Ok(Self { queue })
    }

    fn read(&self, py: Python<'_>, lba: u64, into: PyBuffer<u8>) -> PyResult<u64> {
        self.start(py, lba, Transfer::Read(CallerBuffer::writable(into)?))
    }

    #[pyo3(signature = (lba, data, *, is_forced=false))]
    fn write(
        &self,
        py: Python<'_>,
        lba: u64,
        data: PyBuffer<u8>,
        is_forced: bool,
    ) -> PyResult<u64> {
        let data = CallerBuffer::readable(data)?;
        self.start(py, lba, Transfer::Write { data, is_forced })
    }

    fn compare(&self, py: Python<'_>, lba: u64, data: PyBuffer<u8>) -> PyResult<u64> {
        self.start(py, lba, Transfer::Compare(CallerBuffer::readable(data)?))
    }

    fn compare_and_write(
        &self,
        py: Python<'_>,
        lba: u64,
        expected: PyBuffer<u8>,
        data: PyBuffer<u8>,
    ) -> PyResult<u64> {
        let (expected, data) = (expected.to_vec(py)?, data.to_vec(py)?);
        self.start(py, lba, Transfer::CompareAndWrite { expected, data })
    }

    #[pyo3(signature = (lba, blocks, *, deallocate=false))]
    fn write_zeroes(
        &self,
        py: Python<'_>,
        lba: u64,
        blocks: u64,
        deallocate: bool,
    ) -> PyResult<u64> {
        self.start(py, lba, Transfer::WriteZeroes { blocks, deallocate })
    }

    fn verify(&self, py: Python<'_>, lba: u64, blocks: u64) -> PyResult<u64> {
        self.start(py, lba, Transfer::Verify { blocks })
    }

    fn deallocate(&self, py: Python<'_>, ranges: Vec<(u64, u32)>) -> PyResult<u64> {
        let ranges = ranges.into_iter().map(|(lba, blocks)| LbaRange { lba, blocks }).collect();
        self.start(py, 0, Transfer::Deallocate(ranges))
    }

    fn flush(&self, py: Python<'_>) -> PyResult<u64> {
        self.start(py, 0, Transfer::Flush)
    }

    fn cancel(&self, py: Python<'_>, ticket: u64) {
        py.detach(|| self.queue.cancel(ticket));
    }

    fn take_done(&self, py: Python<'_>) -> Vec<(u64, Option<Py<PyBaseException>>)> {
        let done = py.detach(|| self.queue.take_done());
        let error = |outcome: Result<(), _>| {
            outcome.err().map(|error| transfer_error(error).into_value(py))
        };
        done.into_iter().map(|done| (done.ticket, error(done.outcome))).collect()
    }

    fn event_fd(&self) -> i32 {
        self.queue.as_fd().as_raw_fd()
    }

    fn progress(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.queue.progress())
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.queue.close());
    }
}
