//! NVMe commands for the kernel's passthrough (linux/nvme_ioctl.h), and the fields of a namespace's
//! identify data (NVM Command Set §4.1.5.1, Base §5.17.2.1).

use std::io;

use super::super::store::BLOCK_BYTES;

/// Bytes of an identify data structure.
pub const IDENTIFY_BYTES: usize = 4096;

/// Opcodes of the NVM Command Set.
mod opcode {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const WRITE_ZEROES: u8 = 0x08;
    pub const IDENTIFY: u8 = 0x06;
}

/// Command dword 12: force unit access.
const FUA: u32 = 1 << 30;
/// Command dword 12 of write zeroes: deallocate.
const DEAC: u32 = 1 << 25;
/// Most blocks of one Write Zeroes command: NLB has 16 bits and counts from zero.
pub const ZEROES_BLOCKS_MAX: u64 = 1 << 16;

/// `struct nvme_uring_cmd`; `struct nvme_passthru_cmd` has a result as its last field.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Passthrough {
    /// Opcode.
    pub opcode: u8,
    /// Flags of the submission entry.
    pub flags: u8,
    reserved: u16,
    /// Namespace.
    pub nsid: u32,
    /// Command dwords 2 and 3.
    pub cdw2: [u32; 2],
    /// Address of separate metadata; none here.
    pub metadata: u64,
    /// Address of the data.
    pub address: u64,
    /// Bytes of separate metadata.
    pub metadata_bytes: u32,
    /// Bytes of data.
    pub data_bytes: u32,
    /// Command dwords 10 to 15.
    pub cdw10: [u32; 6],
    /// Time-out; zero selects the kernel's default.
    pub timeout_ms: u32,
    /// Reserved, or dword 0 of the completion.
    pub result: u32,
}

impl Passthrough {
    /// A command on a range of `blocks` ≥ 1, with further bits for dword 12.
    fn range(opcode: u8, nsid: u32, (lba, blocks): (u64, u64), dword12: u32) -> Self {
        let mut cdw10 = [0; 6];
        cdw10[0] = lba as u32;
        cdw10[1] = (lba >> 32) as u32;
        cdw10[2] = (blocks - 1) as u32 & 0xFFFF | dword12;
        Self { opcode, nsid, cdw10, ..Self::default() }
    }

    fn with_data(self, address: u64, bytes: usize) -> Self {
        Self { address, data_bytes: bytes as u32, ..self }
    }

    /// Reads blocks into memory at `address`.
    #[must_use]
    pub fn read(nsid: u32, lba: u64, blocks: u64, address: u64) -> Self {
        let command = Self::range(opcode::READ, nsid, (lba, blocks), 0);
        command.with_data(address, blocks as usize * BLOCK_BYTES)
    }

    /// Writes blocks from memory at `address`.
    #[must_use]
    pub fn write(nsid: u32, lba: u64, blocks: u64, is_durable: bool, address: u64) -> Self {
        let dword12 = if is_durable { FUA } else { 0 };
        let command = Self::range(opcode::WRITE, nsid, (lba, blocks), dword12);
        command.with_data(address, blocks as usize * BLOCK_BYTES)
    }

    /// Makes blocks read as zeros, metadata too, and lets the drive deallocate them.
    #[must_use]
    pub fn write_zeroes(nsid: u32, lba: u64, blocks: u64) -> Self {
        Self::range(opcode::WRITE_ZEROES, nsid, (lba, blocks), DEAC)
    }

    /// Makes completed writes durable.
    #[must_use]
    pub fn flush(nsid: u32) -> Self {
        Self { opcode: opcode::FLUSH, nsid, ..Self::default() }
    }

    /// Identify: CNS 0 for the namespace, 1 for the controller.
    #[must_use]
    pub fn identify(nsid: u32, cns: u8, address: u64) -> Self {
        let nsid = if cns == 0 { nsid } else { 0 };
        let cdw10 = [u32::from(cns), 0, 0, 0, 0, 0];
        let command = Self { opcode: opcode::IDENTIFY, nsid, cdw10, ..Self::default() };
        command.with_data(address, IDENTIFY_BYTES)
    }

    /// The command area of an io_uring submission entry.
    #[must_use]
    pub fn to_bytes(self) -> [u8; 80] {
        let mut bytes = [0; 80];
        let mut rest = &mut bytes[..];
        let mut put = |field: &[u8]| {
            let (front, back) = std::mem::take(&mut rest).split_at_mut(field.len());
            front.copy_from_slice(field);
            rest = back;
        };
        put(&[self.opcode, self.flags]);
        put(&self.reserved.to_ne_bytes());
        put(&self.nsid.to_ne_bytes());
        self.cdw2.iter().for_each(|dword| put(&dword.to_ne_bytes()));
        put(&self.metadata.to_ne_bytes());
        put(&self.address.to_ne_bytes());
        put(&self.metadata_bytes.to_ne_bytes());
        put(&self.data_bytes.to_ne_bytes());
        self.cdw10.iter().for_each(|dword| put(&dword.to_ne_bytes()));
        put(&self.timeout_ms.to_ne_bytes());
        put(&self.result.to_ne_bytes());
        bytes
    }
}

/// Checks that a namespace has 4096-byte blocks, each followed by 64 bytes of metadata, and no
/// protection information. Returns its number of blocks.
pub fn check_namespace(identify: &[u8; IDENTIFY_BYTES]) -> io::Result<u64> {
    let refuse = |detail: String| Err(io::Error::new(io::ErrorKind::InvalidData, detail));
    let mut count = [0; 8];
    count.copy_from_slice(&identify[..8]);
    // FLBAS: format index in bits 3:0 and 6:5, bit 4: metadata at the end of the data.
    let flbas = identify[26];
    let index = usize::from(flbas & 0x0F | (flbas & 0x60) >> 1);
    let format = &identify[128 + 4 * index..132 + 4 * index];
    let (metadata, data_shift) = (u16::from_le_bytes([format[0], format[1]]), format[2]);
    if (metadata, data_shift) != (64, 12) {
        let bytes = 1u64.checked_shl(u32::from(data_shift)).unwrap_or(0);
        return refuse(format!(
            "the drive has blocks of {bytes} + {metadata} bytes, not 4096 + 64"
        ));
    }
    if flbas & 0x10 == 0 {
        return refuse("the drive keeps metadata separate, not at the end of the data".into());
    }
    if identify[29] & 0x7 != 0 {
        return refuse("the drive has protection information enabled".into());
    }
    Ok(u64::from_le_bytes(count))
}

/// Blocks that one command may transfer: MDTS (2^n pages of 4096 bytes; zero means unlimited), but
/// at most `limit`.
#[must_use]
pub fn transfer_blocks(identify_controller: &[u8; IDENTIFY_BYTES], limit: u64) -> u64 {
    let bytes = match u32::from(identify_controller[77]) {
        0 => u64::MAX,
        shift => 4096u64.checked_shl(shift).unwrap_or(u64::MAX),
    };
    (bytes / BLOCK_BYTES as u64).clamp(1, limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dword(bytes: &[u8; 80], offset: usize) -> u32 {
        u32::from_ne_bytes(bytes[offset..offset + 4].try_into().expect("4 bytes"))
    }

    #[test]
    fn commands_have_the_layout_of_the_kernel() {
        assert_eq!(size_of::<Passthrough>(), 72);
        let lba = 0x1_2345_6789;
        let bytes = Passthrough::write(3, lba, 8, true, 0x7F00_1122_3344_5566).to_bytes();
        assert_eq!((bytes[0], dword(&bytes, 4)), (0x01, 3));
        assert_eq!(bytes[24..32], 0x7F00_1122_3344_5566u64.to_ne_bytes());
        assert_eq!(dword(&bytes, 36), 8 * 4160);
        // Dwords 10 to 12: LBA, FUA and the count less one.
        let dwords = [40, 44, 48].map(|offset| dword(&bytes, offset));
        assert_eq!(dwords, [0x2345_6789, 1, 0x4000_0007]);
        assert!(bytes[72..].iter().all(|byte| *byte == 0));
        let read = Passthrough::read(1, 5, 1, 1).to_bytes();
        assert_eq!((read[0], dword(&read, 48), dword(&read, 36)), (0x02, 0, 4160));
        let zeroes = Passthrough::write_zeroes(1, 5, ZEROES_BLOCKS_MAX).to_bytes();
        assert_eq!((zeroes[0], dword(&zeroes, 48)), (0x08, 0x0200_FFFF));
        assert_eq!(dword(&zeroes, 36), 0);
        let flush = Passthrough::flush(9).to_bytes();
        assert_eq!((flush[0], dword(&flush, 4)), (0x00, 9));
        let identify = Passthrough::identify(9, 1, 1).to_bytes();
        assert_eq!((identify[0], dword(&identify, 4), dword(&identify, 40)), (0x06, 0, 1));
        assert_eq!(dword(&identify, 36), 4096);
    }

    fn identify(flbas: u8, formats: &[(u16, u8)]) -> [u8; IDENTIFY_BYTES] {
        let mut data = [0; IDENTIFY_BYTES];
        data[..8].copy_from_slice(&1_000_000u64.to_le_bytes());
        data[26] = flbas;
        for (index, (metadata, shift)) in formats.iter().enumerate() {
            data[128 + 4 * index..130 + 4 * index].copy_from_slice(&metadata.to_le_bytes());
            data[130 + 4 * index] = *shift;
        }
        data
    }

    #[test]
    fn only_extended_blocks_of_4096_and_64_bytes_are_taken() {
        let formats = [(0, 9), (64, 12), (8, 12)];
        assert_eq!(check_namespace(&identify(0x11, &formats)).expect("format"), 1_000_000);
        let error = |data| check_namespace(&data).expect_err("refused").to_string();
        assert!(error(identify(0x01, &formats)).contains("separate"));
        assert!(error(identify(0x10, &formats)).contains("512 + 0"));
        assert!(error(identify(0x12, &formats)).contains("4096 + 8"));
        let mut protected = identify(0x11, &formats);
        protected[29] = 1;
        assert!(error(protected).contains("protection information"));
        // Format 17: upper bits of the index.
        let mut many = vec![(0, 9); 17];
        many.push((64, 12));
        assert!(check_namespace(&identify(0x31, &many)).is_ok());
    }

    #[test]
    fn transfers_follow_mdts() {
        let mut data = [0; IDENTIFY_BYTES];
        assert_eq!(transfer_blocks(&data, 100), 100);
        data[77] = 5;
        assert_eq!(transfer_blocks(&data, 100), 31);
        data[77] = 255;
        assert_eq!(transfer_blocks(&data, 100), 100);
    }
}
