//! Python bindings: thin, one file per area. They convert arguments and release the GIL; they
//! contain no protocol logic.
// Arguments arrive owned: the binding has converted them from Python objects.
#![allow(clippy::needless_pass_by_value)]

use pyo3::prelude::*;

mod accelerator;
mod bitmap;
mod dlpack;
mod flows;
mod gateway;
mod host_queue;
mod jobs;
mod latency;
mod lingering;
mod link;
mod load;
mod pdu;
mod permit;
mod reduce;
mod region;
mod session;
mod simulation;
mod storage;
mod store_anchor;
mod target;
mod wire;

/// Native engine.
#[pymodule]
mod _native {
    use super::{Bound, PyModule, PyModuleMethods, PyResult, accelerator, load, storage};

    #[pymodule_export]
    use crate::bitmap::ChunkBitmap;
    #[pymodule_export]
    use crate::flows::{simulate_flows, simulate_sessions};
    #[pymodule_export]
    use crate::latency::{latencies, latency_bounds};
    #[pymodule_export]
    use crate::link::{Emulator, LinkSettings};
    #[pymodule_export]
    use crate::permit::Permit;
    #[pymodule_export]
    use crate::reduce::{reduce_bfloat16, scale_bfloat16};
    #[pymodule_export]
    use crate::region::{Region, RegionArray};
    #[pymodule_export]
    use crate::session::{
        Completion, JobAccount, JobRing, SessionEndpoint, SharedLine, SharedRegion, Steering,
        UserAccount,
    };
    #[pymodule_export]
    use crate::simulation::{simulate, simulate_ring};
    #[pymodule_export]
    use crate::wire::WireAddress;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("SOCKET_BUFFER_BYTES", sealane_engine::udp::SOCKET_BUFFER_BYTES)?;
        accelerator::register(module)?;
        load::register(module)?;
        storage::register(module)
    }
}
