//! Bindings of the engine's PDU codec, so that the control plane uses the same one for handshakes
//! and admin queues.

use pyo3::create_exception;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use sealane_proto::nvme::pdu::{
    self, CapsuleCmd, CapsuleResp, CommonHeader, DIGEST_BYTES, DataHeader, Digests,
    FLAG_DATA_DIGEST, FLAG_LAST, Header, IcReq, IcResp, Layout, PduLimits, kind,
};
use sealane_proto::nvme::reader::check_header_digest;
use sealane_proto::nvme::transmit::{Data, TransmitQueue};
use sealane_proto::wire::{FromBytes, IntoBytes};

create_exception!(
    sealane._native,
    PduError,
    PyValueError,
    "A PDU violates the protocol. Arguments: (fatal error status, header offset, text)."
);

create_exception!(
    sealane._native,
    DataDigestError,
    PyValueError,
    "The data of a PDU don't match their digest. The command fails; the connection continues."
);

/// Registers everything in this file.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PduHeader>()?;
    module.add("PduError", module.py().get_type::<PduError>())?;
    module.add("DataDigestError", module.py().get_type::<DataDigestError>())?;
    module.add_function(wrap_pyfunction!(pdu_data, module)?)?;
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

/// The fields of a PDU header; fields that its type doesn't have are zero or empty.
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
    /// ICReq: maximum number of R2Ts minus one. ICResp: maximum bytes of one H2CData PDU.
    limit: u32,
    /// Data and R2T: command id, offset, length. Termination: `cid` is the fatal error status.
    cid: u16,
    offset: u32,
    length: u32,
}

fn checked(common: &[u8], limits: &PduLimits) -> PyResult<(u8, Layout)> {
    let header = CommonHeader::read_from_bytes(common)
        .map_err(|_| refused(pdu::PduError::field(0, "truncated header")))?;
    Ok((header.kind, header.check(limits).map_err(refused)?))
}

/// Type, header bytes and data bytes (with digests) of the PDU that starts with these 8 bytes.
#[pyfunction]
#[pyo3(signature = (common, data_max, *, header_digest=false, data_digest=false))]
fn pdu_lengths(
    common: &[u8],
    data_max: usize,
    header_digest: bool,
    data_digest: bool,
) -> PyResult<(u8, usize, usize)> {
    let digests = Digests { header: header_digest, data: data_digest };
    let (kind, layout) =
        checked(common, &PduLimits { capsule_data_max: data_max, data_max, digests })?;
    Ok((kind, layout.bytes_before_data(), layout.bytes_of_data()))
}

/// The data of a PDU without the digest, which must match if the header announces one.
#[pyfunction]
fn pdu_data<'py>(
    py: Python<'py>,
    header: &PduHeader,
    data: &[u8],
) -> PyResult<Bound<'py, PyBytes>> {
    if header.flags & FLAG_DATA_DIGEST == 0 {
        return Ok(PyBytes::new(py, data));
    }
    let digest = |bytes: &[u8]| pdu::digest(bytes).to_le_bytes();
    match data.split_last_chunk::<DIGEST_BYTES>() {
        Some((bytes, last)) if digest(bytes) == *last => Ok(PyBytes::new(py, bytes)),
        _ => Err(DataDigestError::new_err("the data don't match their digest")),
    }
}

/// Decodes one whole header, with its digest if there is one.
#[pyfunction]
#[pyo3(signature = (header, *, header_digest=false, data_digest=false))]
fn decode_pdu(header: &[u8], header_digest: bool, data_digest: bool) -> PyResult<PduHeader> {
    let digests = Digests { header: header_digest, data: data_digest };
    let common = header.get(..pdu::COMMON_BYTES).unwrap_or_default();
    let unlimited = PduLimits { capsule_data_max: usize::MAX, data_max: usize::MAX, digests };
    let (kind, layout) = checked(common, &unlimited)?;
    if header.len() != layout.bytes_before_data() {
        return Err(refused(pdu::PduError::field(2, "header length")));
    }
    let (header, digest) = header.split_at(layout.header_bytes);
    if let Some(digest) = digest.first_chunk() {
        check_header_digest(header, *digest).map_err(refused)?;
    }
    let empty = PduHeader {
        kind,
        flags: header.get(1).copied().unwrap_or_default(),
        ..PduHeader::default()
    };
    Ok(match Header::parse(header, &layout).map_err(refused)? {
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

/// Encodes an ICReq that asks for these digests and one R2T per command.
#[pyfunction]
#[pyo3(signature = (*, header_digest=false, data_digest=false))]
fn encode_ic_req(py: Python<'_>, header_digest: bool, data_digest: bool) -> Bound<'_, PyBytes> {
    let request = IcReq {
        common: CommonHeader::new(kind::IC_REQ, 0, 0, Digests::default()),
        version: 0.into(),
        alignment: 0,
        digests: Digests { header: header_digest, data: data_digest }.field(),
        r2t_max: 0.into(),
        reserved: [0; 112],
    };
    PyBytes::new(py, request.as_bytes())
}

/// Encodes an ICResp that grants these digests.
#[pyfunction]
#[pyo3(signature = (h2c_data_max, *, header_digest=false, data_digest=false))]
fn encode_ic_resp(
    py: Python<'_>,
    h2c_data_max: u32,
    header_digest: bool,
    data_digest: bool,
) -> Bound<'_, PyBytes> {
    let response = IcResp {
        common: CommonHeader::new(kind::IC_RESP, 0, 0, Digests::default()),
        version: 0.into(),
        alignment: 0,
        digests: Digests { header: header_digest, data: data_digest }.field(),
        h2c_data_max: h2c_data_max.into(),
        reserved: [0; 112],
    };
    PyBytes::new(py, response.as_bytes())
}

fn encoded<'py>(py: Python<'py>, header: &[u8], data: &[u8]) -> Bound<'py, PyBytes> {
    let mut queue = TransmitQueue::default();
    queue.put_pdu(header, if data.is_empty() { Data::None } else { Data::Copied(data) });
    PyBytes::new(py, &queue.take())
}

fn entry<T: FromBytes>(bytes: &[u8]) -> PyResult<T> {
    T::read_from_bytes(bytes).map_err(|_| {
        PyValueError::new_err(format!("a queue entry can't have {} bytes", bytes.len()))
    })
}

/// Encodes a command capsule with its in-capsule data.
#[pyfunction]
#[pyo3(signature = (submission, data, *, header_digest=false, data_digest=false))]
fn encode_capsule_cmd<'py>(
    py: Python<'py>,
    submission: &[u8],
    data: &[u8],
    header_digest: bool,
    data_digest: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let digests = Digests { header: header_digest, data: data_digest };
    let common = CommonHeader::new(kind::CAPSULE_CMD, 0, data.len(), digests);
    let capsule = CapsuleCmd { common, entry: entry(submission)? };
    Ok(encoded(py, capsule.as_bytes(), data))
}

/// Encodes a response capsule.
#[pyfunction]
#[pyo3(signature = (completion, *, header_digest=false))]
fn encode_capsule_resp<'py>(
    py: Python<'py>,
    completion: &[u8],
    header_digest: bool,
) -> PyResult<Bound<'py, PyBytes>> {
    let digests = Digests { header: header_digest, data: false };
    let common = CommonHeader::new(kind::CAPSULE_RESP, 0, 0, digests);
    let capsule = CapsuleResp { common, entry: entry(completion)? };
    Ok(encoded(py, capsule.as_bytes(), &[]))
}

/// Encodes one C2HData PDU that carries all data of a command.
#[pyfunction]
#[pyo3(signature = (cid, data, *, header_digest=false, data_digest=false))]
fn encode_c2h_data<'py>(
    py: Python<'py>,
    cid: u16,
    data: &[u8],
    header_digest: bool,
    data_digest: bool,
) -> Bound<'py, PyBytes> {
    let digests = Digests { header: header_digest, data: data_digest };
    let header = DataHeader {
        common: CommonHeader::new(kind::C2H_DATA, FLAG_LAST, data.len(), digests),
        cid: cid.into(),
        tag: 0.into(),
        offset: 0.into(),
        length: (data.len() as u32).into(),
        reserved: [0; 4],
    };
    encoded(py, header.as_bytes(), data)
}

/// Encodes a termination request of the host or the controller, with the header at fault.
#[pyfunction]
fn encode_termination<'py>(
    py: Python<'py>,
    from_host: bool,
    code: u16,
    offset: u32,
    offending: &[u8],
) -> Bound<'py, PyBytes> {
    let error = pdu::PduError { code, offset, what: "" };
    PyBytes::new(py, &pdu::termination(from_host, error, offending))
}
