//! Bindings of the PDU codec, for the control side's handshakes and admin queues: the engine's
//! own codec, so there is only one.

use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sealane_proto::nvme::pdu::{
    self, CapsuleCmd, CapsuleResp, CommonHeader, DataHeader, FLAG_LAST, Header, IcReq, IcResp, kind,
};
use sealane_proto::wire::{FromBytes, IntoBytes};

create_exception!(
    sealane._native,
    PduError,
    PyValueError,
    "A PDU breaks the rules: arguments (fatal error status, header offset, text)."
);

/// Registers everything of this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PduHeader>()?;
    module.add("PduError", module.py().get_type::<PduError>())?;
    module.add_function(wrap_pyfunction!(pdu_lengths, module)?)?;
    module.add_function(wrap_pyfunction!(decode_pdu, module)?)?;
    module.add_function(wrap_pyfunction!(encode_ic_req, module)?)?;
    module.add_function(wrap_pyfunction!(encode_ic_resp, module)?)?;
    module.add_function(wrap_pyfunction!(encode_capsule_cmd, module)?)?;
    module.add_function(wrap_pyfunction!(encode_capsule_resp, module)?)?;
    module.add_function(wrap_pyfunction!(encode_c2h_data, module)?)?;
    module.add_function(wrap_pyfunction!(encode_termination, module)?)?;
    Ok(())
}

fn refused(error: pdu::PduError) -> PyErr {
    PduError::new_err((error.code, error.offset, error.to_string()))
}

/// The fields of a PDU header; those its type doesn't have are zero or empty.
#[pyclass(frozen, get_all, module = "sealane._native")]
#[derive(Default)]
struct PduHeader {
    kind: u8,
    flags: u8,
    /// Submission entry (64 bytes) or completion entry (16 bytes) of a capsule.
    entry: Vec<u8>,
    /// ICReq, ICResp: format version, alignment, digests.
    version: u16,
    alignment: u8,
    digests: u8,
    /// ICReq: most R2Ts minus one. ICResp: most bytes of one H2CData PDU.
    limit: u32,
    /// Data and R2T: command id, offset, length. Termination: `cid` is the fatal error status.
    cid: u16,
    offset: u32,
    length: u32,
}

/// Type, header bytes and data bytes of the PDU whose first 8 bytes are given.
#[pyfunction]
fn pdu_lengths(common: &[u8], data_max: usize) -> PyResult<(u8, usize, usize)> {
    let header = CommonHeader::read_from_bytes(common)
        .map_err(|_| refused(pdu::PduError::field(0, "truncated header")))?;
    let (header_bytes, data_bytes) = header.check(data_max).map_err(refused)?;
    Ok((header.kind, header_bytes, data_bytes))
}

/// Decodes one whole header.
#[pyfunction]
fn decode_pdu(header: &[u8]) -> PyResult<PduHeader> {
    let common = header.get(..pdu::COMMON_BYTES).unwrap_or_default();
    let (kind, header_bytes, _) = pdu_lengths(common, usize::MAX)?;
    if header.len() != header_bytes {
        return Err(refused(pdu::PduError::field(2, "header length")));
    }
    let empty = PduHeader {
        kind,
        flags: header.get(1).copied().unwrap_or_default(),
        ..PduHeader::default()
    };
    Ok(match Header::parse(header).map_err(refused)? {
        Header::IcReq(IcReq { version, alignment, digests, r2t_max: limit, .. })
        | Header::IcResp(IcResp { version, alignment, digests, h2c_data_max: limit, .. }) => {
            PduHeader { version: version.get(), alignment, digests, limit: limit.get(), ..empty }
        }
        Header::CapsuleCmd(capsule) => {
            PduHeader { entry: capsule.entry.as_bytes().to_vec(), ..empty }
        }
        Header::CapsuleResp(capsule) => {
            PduHeader { entry: capsule.entry.as_bytes().to_vec(), ..empty }
        }
        Header::HostTermination(request) | Header::ControllerTermination(request) => {
            PduHeader { cid: request.code.get(), offset: request.information.get(), ..empty }
        }
        Header::HostData(data) | Header::ControllerData(data) => PduHeader {
            cid: data.cid.get(),
            offset: data.offset.get(),
            length: data.length.get(),
            ..empty
        },
        Header::R2t(request) => PduHeader {
            cid: request.cid.get(),
            offset: request.offset.get(),
            length: request.length.get(),
            ..empty
        },
    })
}

/// ICReq without digests, one R2T per command.
#[pyfunction]
fn encode_ic_req(py: Python<'_>) -> Bound<'_, PyBytes> {
    let request = IcReq {
        common: CommonHeader::new(kind::IC_REQ, 0, 0),
        version: 0.into(),
        alignment: 0,
        digests: 0,
        r2t_max: 0.into(),
        reserved: [0; 112],
    };
    PyBytes::new(py, request.as_bytes())
}

/// ICResp without digests.
#[pyfunction]
fn encode_ic_resp(py: Python<'_>, h2c_data_max: u32) -> Bound<'_, PyBytes> {
    let response = IcResp {
        common: CommonHeader::new(kind::IC_RESP, 0, 0),
        version: 0.into(),
        alignment: 0,
        digests: 0,
        h2c_data_max: h2c_data_max.into(),
        reserved: [0; 112],
    };
    PyBytes::new(py, response.as_bytes())
}

fn entry<T: FromBytes>(bytes: &[u8]) -> PyResult<T> {
    T::read_from_bytes(bytes)
        .map_err(|_| PyValueError::new_err(format!("an entry can't have {} bytes", bytes.len())))
}

/// Command capsule with its in-capsule data.
#[pyfunction]
fn encode_capsule_cmd<'py>(
    py: Python<'py>,
    submission: &[u8],
    data: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    let common = CommonHeader::new(kind::CAPSULE_CMD, 0, data.len());
    let capsule = CapsuleCmd { common, entry: entry(submission)? };
    Ok(PyBytes::new(py, &[capsule.as_bytes(), data].concat()))
}

/// Response capsule.
#[pyfunction]
fn encode_capsule_resp<'py>(py: Python<'py>, completion: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
    let common = CommonHeader::new(kind::CAPSULE_RESP, 0, 0);
    let capsule = CapsuleResp { common, entry: entry(completion)? };
    Ok(PyBytes::new(py, capsule.as_bytes()))
}

/// One C2HData PDU that carries all data of a command.
#[pyfunction]
fn encode_c2h_data<'py>(py: Python<'py>, cid: u16, data: &[u8]) -> Bound<'py, PyBytes> {
    let header = DataHeader {
        common: CommonHeader::new(kind::C2H_DATA, FLAG_LAST, data.len()),
        cid: cid.into(),
        tag: 0.into(),
        offset: 0.into(),
        length: (data.len() as u32).into(),
        reserved: [0; 4],
    };
    PyBytes::new(py, &[header.as_bytes(), data].concat())
}

/// Termination request of the host or of the controller.
#[pyfunction]
fn encode_termination(
    py: Python<'_>,
    from_host: bool,
    code: u16,
    offset: u32,
) -> Bound<'_, PyBytes> {
    let error = pdu::PduError { code, offset, what: "" };
    PyBytes::new(py, pdu::termination(from_host, error).as_bytes())
}
