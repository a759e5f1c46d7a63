//! The kernel: four AES blocks per register, eight registers at a time. It contains all unsafe code
//! of the crate: calls of functions that need a processor feature, and loads and stores within the
//! slices that a [`Stream`] is made of, or within the table of powers.
//!
//! GHASH is computed as POLYVAL, its mirror image (RFC 8452, appendix A): blocks are byte-reversed,
//! the hash key is multiplied by x once, and a product is reduced in two steps of 64 bits. Products
//! of up to 36 blocks are summed before reduction. While one group of blocks is encrypted, the
//! previous one is hashed, so neither has to wait for the other.

#[allow(clippy::wildcard_imports)] // intrinsics have a prefix of their own
use std::arch::x86_64::*;

use zeroize::{Zeroize, ZeroizeOnDrop};

use crate::{BLOCK_BYTES, KEY_BYTES, NONCE_BYTES, TAG_BYTES};

const VECTOR_BYTES: usize = 64;
/// Blocks per vector.
const LANES: usize = 4;
/// Vectors per group, chosen to hide the latency of an AES round.
const WIDTH: usize = 8;
const GROUP_BYTES: usize = WIDTH * VECTOR_BYTES;
/// AES-256: 14 rounds, plus the key that is added before them.
const ROUND_KEYS: usize = 15;
/// Powers of the hash key: for a group, plus a vector with the block of lengths.
const POWERS: usize = (WIDTH + 1) * LANES;
/// x^128 modulo the polynomial of POLYVAL; its upper half is x^127 + x^126 + x^121.
const POLYNOMIAL: u128 = 0xc200_0000_0000_0000_0000_0000_0000_0001;

type Vectors<const N: usize> = [__m512i; N];

/// The processor features that functions here are compiled with, and whether this processor has
/// them.
fn features() -> [(&'static str, bool); 5] {
    [
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("aes", is_x86_feature_detected!("aes")),
        ("vaes", is_x86_feature_detected!("vaes")),
        ("vpclmulqdq", is_x86_feature_detected!("vpclmulqdq")),
    ]
}

/// The round keys, and the powers of the hash key in descending order, followed by zeros so that a
/// vector can be loaded starting at any of them.
#[repr(C, align(64))]
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct Schedule {
    powers: [[u8; BLOCK_BYTES]; POWERS + LANES - 1],
    round_keys: [[u8; BLOCK_BYTES]; ROUND_KEYS],
}

impl Schedule {
    pub fn new(secret: &[u8; KEY_BYTES]) -> Option<Box<Self>> {
        Self::with(&features(), secret)
    }

    /// `features` is the result of [`features`], possibly with some missing.
    fn with(features: &[(&str, bool)], secret: &[u8; KEY_BYTES]) -> Option<Box<Self>> {
        let is_able = features.iter().all(|(_, is_there)| *is_there);
        if !is_able {
            return None;
        }
        let mut schedule = Box::new(Self {
            powers: [[0; BLOCK_BYTES]; POWERS + LANES - 1],
            round_keys: [[0; BLOCK_BYTES]; ROUND_KEYS],
        });
        // SAFETY: the processor has the features.
        unsafe { schedule.expand(secret) };
        Some(schedule)
    }

    pub fn seal(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], data: &mut [u8]) -> [u8; TAG_BYTES] {
        let into = data.as_mut_ptr();
        // SAFETY: a schedule exists, so the processor has the features; `data` may be read and
        // written for its whole length.
        unsafe { bytes_of(self.pass::<true>(nonce, aad, (into, into, data.len()))) }
    }

    /// Encrypts from one slice into the other. Both have equal lengths.
    pub fn seal_into(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        (from, into): (&[u8], &mut [u8]),
    ) -> [u8; TAG_BYTES] {
        let length = from.len().min(into.len());
        // SAFETY: as in `seal`; both slices have `length` bytes and do not overlap.
        unsafe {
            bytes_of(self.pass::<true>(nonce, aad, (from.as_ptr(), into.as_mut_ptr(), length)))
        }
    }

    /// Whether the tag is right.
    pub fn open_in_place(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        data: &mut [u8],
        tag: &[u8; TAG_BYTES],
    ) -> bool {
        let into = data.as_mut_ptr();
        // SAFETY: as in `seal`.
        unsafe { is_equal(self.pass::<false>(nonce, aad, (into, into, data.len())), *tag) }
    }

    /// Whether the tag is right. Both slices have equal lengths.
    pub fn open(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        (from, into): (&[u8], &mut [u8]),
        tag: &[u8; TAG_BYTES],
    ) -> bool {
        let length = from.len().min(into.len());
        // SAFETY: as in `seal`; both slices have `length` bytes and do not overlap.
        unsafe {
            let made = self.pass::<false>(nonce, aad, (from.as_ptr(), into.as_mut_ptr(), length));
            is_equal(made, *tag)
        }
    }

    /// The tag of a ciphertext: one pass over it, without the block cipher.
    pub fn tag(&self, nonce: &[u8; NONCE_BYTES], aad: &[u8], ciphertext: &[u8]) -> [u8; TAG_BYTES] {
        // SAFETY: as in `seal`.
        unsafe {
            bytes_of(self.hash_and_pad(nonce, [aad, ciphertext], (aad.len(), ciphertext.len())))
        }
    }

    /// The tag of additional data in two pieces; the first is a whole number of blocks.
    pub fn tag_of_pieces(&self, nonce: &[u8; NONCE_BYTES], pieces: [&[u8]; 2]) -> [u8; TAG_BYTES] {
        let aad_bytes = pieces.iter().map(|piece| piece.len()).sum();
        // SAFETY: as in `seal`.
        unsafe { bytes_of(self.hash_and_pad(nonce, pieces, (aad_bytes, 0))) }
    }

    /// What a block of the message is combined with.
    pub fn keystream(&self, nonce: &[u8; NONCE_BYTES], place: u32) -> [u8; BLOCK_BYTES] {
        // The first counter is the tag's.
        // SAFETY: as in `seal`.
        unsafe { bytes_of(self.encrypt(block(counter_block(nonce, place + 2)))) }
    }

    /// Expands the key (FIPS 197 §5.2) and computes the powers of the hash key, which is the
    /// encryption of a zero block.
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn expand(&mut self, secret: &[u8; KEY_BYTES]) {
        let (first, second) = secret.split_at(BLOCK_BYTES);
        self.round_keys[0].copy_from_slice(first);
        self.round_keys[1].copy_from_slice(second);
        self.expand_pair::<0x01>(2);
        self.expand_pair::<0x02>(4);
        self.expand_pair::<0x04>(6);
        self.expand_pair::<0x08>(8);
        self.expand_pair::<0x10>(10);
        self.expand_pair::<0x20>(12);
        self.expand_pair::<0x40>(14);
        let mut hash_key = bytes_of(self.encrypt(_mm_setzero_si128()));
        // Times x: POLYVAL with this key is the mirror image of GHASH.
        let mirrored = u128::from_be_bytes(hash_key);
        hash_key = ((mirrored << 1) ^ ((mirrored >> 127) * POLYNOMIAL)).to_le_bytes();
        let mut power = hash_key;
        for place in (0..POWERS).rev() {
            self.powers[place] = power;
            let mut sum = Sum::zero();
            sum.add(_mm512_zextsi128_si512(block(power)), _mm512_zextsi128_si512(block(hash_key)));
            power = bytes_of(sum.reduce());
        }
        power.zeroize();
        hash_key.zeroize();
    }

    /// Computes round key `at` and, if there is one, the next.
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn expand_pair<const CONSTANT: i32>(&mut self, at: usize) {
        let [before, last] = [at - 2, at - 1].map(|index| block(self.round_keys[index]));
        let word = _mm_shuffle_epi32::<0xff>(_mm_aeskeygenassist_si128::<CONSTANT>(last));
        let even = _mm_xor_si128(prefix_sums(before), word);
        self.round_keys[at] = bytes_of(even);
        if let Some(odd) = self.round_keys.get_mut(at + 1) {
            let word = _mm_shuffle_epi32::<0xaa>(_mm_aeskeygenassist_si128::<0>(even));
            *odd = bytes_of(_mm_xor_si128(prefix_sums(last), word));
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn encrypt(&self, plaintext: __m128i) -> __m128i {
        let [first, between @ .., last] = &self.round_keys;
        let state = _mm_xor_si128(plaintext, block(*first));
        let state = between.iter().fold(state, |state, key| _mm_aesenc_si128(state, block(*key)));
        _mm_aesenclast_si128(state, block(*last))
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn round_key(&self, round: usize) -> __m512i {
        _mm512_broadcast_i32x4(block(self.round_keys[round]))
    }

    /// Four powers, from this one downwards; below the first power they are zero.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn powers_from(&self, power: usize) -> __m512i {
        let vector: &[[u8; BLOCK_BYTES]; LANES] =
            self.powers[POWERS - power..].first_chunk().expect("zeros follow the first power");
        // SAFETY: a vector has the size of four blocks.
        unsafe { _mm512_loadu_si512(vector.as_ptr().cast()) }
    }

    /// Encrypts or decrypts `length` bytes and returns the tag.
    ///
    /// # Safety
    /// `from` may be read and `into` written for `length` bytes; they are equal or do not overlap.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    unsafe fn pass<const SEAL: bool>(
        &self,
        nonce: &[u8; NONCE_BYTES],
        aad: &[u8],
        (from, into, length): (*const u8, *mut u8, usize),
    ) -> __m128i {
        let first = block(counter_block(nonce, 1));
        let pad = self.encrypt(first);
        let counter = _mm512_add_epi32(
            _mm512_broadcast_i32x4(reverse_block(first)),
            _mm512_set_epi32(0, 0, 0, 4, 0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1),
        );
        let hash = self.absorb(_mm_setzero_si128(), aad);
        let lengths = lengths_block(aad.len(), length);
        let mut stream = Stream { schedule: self, counter, hash, from, into, left: length };
        // SAFETY: guaranteed by the caller.
        let hash = unsafe { stream.run::<SEAL>(lengths) };
        _mm_xor_si128(reverse_block(hash), pad)
    }

    /// The tag of two pieces, each filled up to whole blocks; the lengths are those of the
    /// additional data and of the ciphertext.
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn hash_and_pad(
        &self,
        nonce: &[u8; NONCE_BYTES],
        [first, last]: [&[u8]; 2],
        (aad_bytes, data_bytes): (usize, usize),
    ) -> __m128i {
        let hash = self.absorb(self.absorb(_mm_setzero_si128(), first), last);
        let lengths = _mm_xor_si128(lengths_block(aad_bytes, data_bytes), hash);
        let mut sum = Sum::zero();
        sum.add(_mm512_zextsi128_si512(lengths), self.powers_from(1));
        _mm_xor_si128(reverse_block(sum.reduce()), self.encrypt(block(counter_block(nonce, 1))))
    }

    /// Hashes `bytes` after what gave `hash`; a partial last block is filled with zeros.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn absorb(&self, mut hash: __m128i, bytes: &[u8]) -> __m128i {
        for part in bytes.chunks(GROUP_BYTES) {
            let mut power = part.len().div_ceil(BLOCK_BYTES);
            let mut sum = Sum::zero();
            let mut carried = _mm512_zextsi128_si512(hash);
            for piece in part.chunks(VECTOR_BYTES) {
                // SAFETY: the mask covers only bytes of the piece.
                let vector =
                    unsafe { _mm512_maskz_loadu_epi8(mask_of(piece.len()), piece.as_ptr().cast()) };
                sum.add(_mm512_xor_si512(reverse(vector), carried), self.powers_from(power));
                carried = _mm512_setzero_si512();
                power = power.saturating_sub(LANES);
            }
            hash = sum.reduce();
        }
        hash
    }
}

/// The input of the block cipher for counter `count` (SP 800-38D §7.1).
fn counter_block(nonce: &[u8; NONCE_BYTES], count: u32) -> [u8; BLOCK_BYTES] {
    let mut input = [0; BLOCK_BYTES];
    input[..NONCE_BYTES].copy_from_slice(nonce);
    input[NONCE_BYTES..].copy_from_slice(&count.to_be_bytes());
    input
}

/// The last block that is hashed: both lengths in bits, byte-reversed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
fn lengths_block(aad_bytes: usize, data_bytes: usize) -> __m128i {
    let bits = |bytes: usize| (bytes as u64 * 8).cast_signed();
    _mm_set_epi64x(bits(aad_bytes), bits(data_bytes))
}

/// A message that is being encrypted or decrypted.
struct Stream<'a> {
    schedule: &'a Schedule,
    /// Byte-reversed counters of the next four blocks.
    counter: __m512i,
    hash: __m128i,
    /// Readable for `left` bytes …
    from: *const u8,
    /// … and writable. The two are equal or do not overlap.
    into: *mut u8,
    left: usize,
}

impl Stream<'_> {
    /// Processes the whole message and returns the hash including the lengths.
    ///
    /// # Safety
    /// The pointers fulfil what their fields require.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    unsafe fn run<const SEAL: bool>(&mut self, lengths: __m128i) -> __m128i {
        let mut ciphertext = None;
        while self.left >= GROUP_BYTES {
            // SAFETY: a whole group is left.
            ciphertext = Some(unsafe { self.group::<SEAL>(ciphertext.as_ref()) });
        }
        if SEAL && let Some(ciphertext) = ciphertext {
            self.hash_group(&ciphertext);
        }
        // SAFETY: that many vectors are left, the last one possibly partial.
        unsafe {
            match self.left.div_ceil(VECTOR_BYTES) {
                0 => self.finish::<0, SEAL>(lengths),
                1 => self.finish::<1, SEAL>(lengths),
                2 => self.finish::<2, SEAL>(lengths),
                3 => self.finish::<3, SEAL>(lengths),
                4 => self.finish::<4, SEAL>(lengths),
                5 => self.finish::<5, SEAL>(lengths),
                6 => self.finish::<6, SEAL>(lengths),
                7 => self.finish::<7, SEAL>(lengths),
                _ => self.finish::<WIDTH, SEAL>(lengths),
            }
        }
    }

    /// Processes a whole group. Sealing hashes the ciphertext of the previous group, which is in
    /// registers, and returns that of this one; opening hashes this one.
    ///
    /// # Safety
    /// As for [`Self::run`], and a whole group is left.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    unsafe fn group<const SEAL: bool>(
        &mut self,
        before: Option<&Vectors<WIDTH>>,
    ) -> Vectors<WIDTH> {
        let (from, into) = (self.from, self.into);
        // SAFETY: the vectors belong to the group that is left.
        let read = |i: usize| unsafe { _mm512_loadu_si512(from.add(i * VECTOR_BYTES).cast()) };
        let hashed =
            if SEAL { before.copied() } else { Some(std::array::from_fn(|i| reverse(read(i)))) };
        let states = match hashed {
            None => self.rounds(|_| ()),
            Some(hashed) => {
                let schedule = self.schedule;
                let mut sum = Sum::zero();
                let mut carried = _mm512_zextsi128_si512(self.hash);
                let states = self.rounds(|round| {
                    if let Some(vector) = hashed.get(round) {
                        let powers = schedule.powers_from((WIDTH - round) * LANES);
                        sum.add(_mm512_xor_si512(*vector, carried), powers);
                        carried = _mm512_setzero_si512();
                    }
                });
                self.hash = sum.reduce();
                states
            }
        };
        let last = self.schedule.round_key(ROUND_KEYS - 1);
        let mut made = states;
        for (i, state) in states.into_iter().enumerate() {
            made[i] = _mm512_aesenclast_epi128(state, _mm512_xor_si512(read(i), last));
            // SAFETY: as for the reads.
            unsafe { _mm512_storeu_si512(into.add(i * VECTOR_BYTES).cast(), made[i]) };
        }
        // SAFETY: a group was left.
        (self.from, self.into) = unsafe { (from.add(GROUP_BYTES), into.add(GROUP_BYTES)) };
        self.left -= GROUP_BYTES;
        made.map(|vector| reverse(vector))
    }

    /// Processes the rest, `N` vectors, and the lengths.
    ///
    /// # Safety
    /// As for [`Self::run`], and `N` vectors are left, the last one possibly partial.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    unsafe fn finish<const N: usize, const SEAL: bool>(&mut self, lengths: __m128i) -> __m128i {
        let left = self.left;
        let (states, last): (Vectors<N>, _) =
            (self.rounds(|_| ()), self.schedule.round_key(ROUND_KEYS - 1));
        let mut power = left.div_ceil(BLOCK_BYTES) + 1;
        let mut sum = Sum::zero();
        let mut carried = _mm512_zextsi128_si512(self.hash);
        for (i, state) in states.into_iter().enumerate() {
            let at = i * VECTOR_BYTES;
            let mask = mask_of((left - at).min(VECTOR_BYTES));
            // SAFETY: the mask covers only bytes that are left.
            let read = unsafe { _mm512_maskz_loadu_epi8(mask, self.from.add(at).cast()) };
            let made = _mm512_aesenclast_epi128(state, _mm512_xor_si512(read, last));
            // SAFETY: as for the read.
            unsafe { _mm512_mask_storeu_epi8(self.into.add(at).cast(), mask, made) };
            let hashed = if SEAL { _mm512_maskz_mov_epi8(mask, made) } else { read };
            let powers = self.schedule.powers_from(power);
            sum.add(_mm512_xor_si512(reverse(hashed), carried), powers);
            carried = _mm512_setzero_si512();
            power -= LANES.min(power - 1);
        }
        let lengths = _mm512_xor_si512(_mm512_zextsi128_si512(lengths), carried);
        sum.add(lengths, self.schedule.powers_from(1));
        sum.reduce()
    }

    /// Runs the counters through all rounds but the last; `beside` is executed between the rounds.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn rounds<const N: usize>(&mut self, mut beside: impl FnMut(usize)) -> Vectors<N> {
        let step = _mm512_set_epi32(0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4);
        let first = self.schedule.round_key(0);
        let mut states = [self.counter; N];
        for state in &mut states {
            *state = _mm512_xor_si512(reverse(self.counter), first);
            self.counter = _mm512_add_epi32(self.counter, step);
        }
        for round in 1..ROUND_KEYS - 1 {
            let key = self.schedule.round_key(round);
            for state in &mut states {
                *state = _mm512_aesenc_epi128(*state, key);
            }
            beside(round - 1);
        }
        states
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn hash_group(&mut self, ciphertext: &Vectors<WIDTH>) {
        let mut sum = Sum::zero();
        let mut carried = _mm512_zextsi128_si512(self.hash);
        for (i, vector) in ciphertext.iter().enumerate() {
            let powers = self.schedule.powers_from((WIDTH - i) * LANES);
            sum.add(_mm512_xor_si512(*vector, carried), powers);
            carried = _mm512_setzero_si512();
        }
        self.hash = sum.reduce();
    }
}

/// Sums of products in each of four lanes, separated by the weight of their 64-bit halves.
struct Sum {
    low: __m512i,
    middle: __m512i,
    high: __m512i,
}

impl Sum {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn zero() -> Self {
        let zero = _mm512_setzero_si512();
        Self { low: zero, middle: zero, high: zero }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn add(&mut self, blocks: __m512i, powers: __m512i) {
        let low = _mm512_clmulepi64_epi128::<0x00>(blocks, powers);
        let high = _mm512_clmulepi64_epi128::<0x11>(blocks, powers);
        let one = _mm512_clmulepi64_epi128::<0x01>(blocks, powers);
        let other = _mm512_clmulepi64_epi128::<0x10>(blocks, powers);
        self.low = _mm512_xor_si512(self.low, low);
        self.high = _mm512_xor_si512(self.high, high);
        self.middle = sum_of_three(self.middle, one, other);
    }

    /// The sum of the lanes, times x^-128.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,aes,vaes,vpclmulqdq")]
    fn reduce(self) -> __m128i {
        // Adding a multiple of the polynomial clears the lowest 64 bits; this is done twice.
        let upper = _mm512_set1_epi64(((POLYNOMIAL >> 64) as u64).cast_signed());
        let folded = _mm512_clmulepi64_epi128::<0x00>(self.low, upper);
        let middle = sum_of_three(self.middle, folded, _mm512_shuffle_epi32::<0x4e>(self.low));
        let folded = _mm512_clmulepi64_epi128::<0x00>(middle, upper);
        let lanes = sum_of_three(self.high, folded, _mm512_shuffle_epi32::<0x4e>(middle));
        let halves =
            _mm256_xor_si256(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64::<1>(lanes));
        _mm_xor_si128(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves))
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn sum_of_three(a: __m512i, b: __m512i, c: __m512i) -> __m512i {
    _mm512_ternarylogic_epi64::<0x96>(a, b, c)
}

/// Each 32-bit word XORed with all words before it.
#[inline]
#[target_feature(enable = "sse2")]
fn prefix_sums(words: __m128i) -> __m128i {
    let pairs = _mm_xor_si128(words, _mm_slli_si128::<4>(words));
    _mm_xor_si128(pairs, _mm_slli_si128::<8>(pairs))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn reverse(blocks: __m512i) -> __m512i {
    _mm512_shuffle_epi8(blocks, _mm512_broadcast_i32x4(backwards()))
}

#[inline]
#[target_feature(enable = "ssse3")]
fn reverse_block(block: __m128i) -> __m128i {
    _mm_shuffle_epi8(block, backwards())
}

#[inline]
#[target_feature(enable = "sse2")]
fn backwards() -> __m128i {
    _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
}

/// A mask with a bit for each of `bytes` bytes, 1 to 64.
#[inline]
fn mask_of(bytes: usize) -> u64 {
    u64::MAX >> (VECTOR_BYTES - bytes)
}

#[inline]
#[target_feature(enable = "sse2")]
fn block(bytes: [u8; BLOCK_BYTES]) -> __m128i {
    let value = u128::from_le_bytes(bytes).cast_signed();
    _mm_set_epi64x((value >> 64) as i64, value as i64)
}

#[inline]
#[target_feature(enable = "sse4.1")]
fn bytes_of(block: __m128i) -> [u8; BLOCK_BYTES] {
    let (low, high) = (_mm_cvtsi128_si64(block), _mm_extract_epi64::<1>(block));
    (u128::from(high.cast_unsigned()) << 64 | u128::from(low.cast_unsigned())).to_le_bytes()
}

/// Compares in constant time.
#[inline]
#[target_feature(enable = "sse4.1")]
fn is_equal(made: __m128i, tag: [u8; TAG_BYTES]) -> bool {
    let difference = _mm_xor_si128(made, block(tag));
    _mm_testz_si128(difference, difference) == 1
}

#[cfg(test)]
mod tests {
    use std::mem::MaybeUninit;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use memmap2::{Mmap, MmapOptions};

    use super::*;
    use crate::{DATA_BYTES_MAX, Key};

    /// Bytes of the schedule without the padding after the round keys.
    const SCHEDULE_BYTES: usize = (POWERS + LANES - 1 + ROUND_KEYS) * BLOCK_BYTES;

    /// Counters follow inc32 of SP 800-38D: they carry into every byte and wrap at 2^32, which no
    /// message reaches.
    #[test]
    fn counters_carry_into_every_byte_and_go_round() {
        let Some(schedule) = Schedule::new(&[7; 32]) else { return };
        for start in [0x00fe, 0xffe3, 0x00ff_fff7, 0xffff_fff1_u32] {
            let mut data = vec![0; 3 * GROUP_BYTES + 100];
            // SAFETY: a schedule exists, so the processor has the features; both pointers belong to
            // one buffer of that length.
            unsafe {
                let first = u128::from(start).to_le_bytes();
                let counter = _mm512_broadcast_i32x4(block(first));
                let lanes = _mm512_set_epi32(0, 0, 0, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0);
                let mut stream = Stream {
                    schedule: &schedule,
                    counter: _mm512_add_epi32(counter, lanes),
                    hash: _mm_setzero_si128(),
                    from: data.as_ptr(),
                    into: data.as_mut_ptr(),
                    left: data.len(),
                };
                stream.run::<true>(_mm_setzero_si128());
            }
            for (index, made) in data.chunks(BLOCK_BYTES).enumerate() {
                let counter = u128::from(start.wrapping_add(index as u32)).to_be_bytes();
                // SAFETY: the processor has the features.
                let expected = unsafe { bytes_of(schedule.encrypt(block(counter))) };
                assert_eq!(*made, expected[..made.len()], "{start:#x} + {index}");
            }
        }
    }

    /// FIPS 197, appendix C.3.
    #[test]
    fn the_block_cipher_is_aes_256() {
        let secret = std::array::from_fn(|index| index as u8);
        let Some(schedule) = Schedule::new(&secret) else { return };
        let plaintext = u128::to_be_bytes(0x0011_2233_4455_6677_8899_aabb_ccdd_eeff);
        // SAFETY: the processor has the features.
        let made = unsafe { bytes_of(schedule.encrypt(block(plaintext))) };
        assert_eq!(made, u128::to_be_bytes(0x8ea2_b7ca_5167_45bf_eafc_4990_4b49_6089));
    }

    /// Without any one of the features there is no schedule, and no function here uses another
    /// feature.
    #[test]
    fn a_processor_that_lacks_a_feature_gets_no_schedule() {
        let found = features();
        for index in 0..found.len() {
            let mut lacking = found;
            lacking[index].1 = false;
            assert!(Schedule::with(&lacking, &[7; 32]).is_none(), "{}", lacking[index].0);
        }
        // AVX-512 implies these.
        let implied = ["sse2", "ssse3", "sse4.1"];
        let uses = include_str!("kernel.rs").split("target_feature(enable = \"").skip(1);
        let names = uses.flat_map(|rest| rest.split('"').next().unwrap_or_default().split(','));
        for name in names {
            let is_looked_for = found.iter().any(|(feature, _)| *feature == name);
            assert!(is_looked_for || implied.contains(&name), "{name}");
        }
    }

    #[test]
    fn a_dropped_schedule_is_wiped() {
        let Some(schedule) = Schedule::new(&[7; 32]) else { return };
        let mut place = MaybeUninit::new(*schedule);
        // SAFETY: it is dropped once, and then read as bytes, for which any value is valid; there
        // is no padding.
        let left = unsafe {
            place.assume_init_drop();
            *place.as_ptr().cast::<[u8; SCHEDULE_BYTES]>()
        };
        assert_eq!(left, [0; SCHEDULE_BYTES]);
    }

    /// One byte more than GCM allows, as address space only: none of it may be written.
    fn too_long() -> Mmap {
        let length = usize::try_from(DATA_BYTES_MAX + 1).unwrap();
        let space = MmapOptions::new().len(length).no_reserve_swap().map_anon().unwrap();
        space.make_read_only().unwrap()
    }

    #[test]
    fn a_message_longer_than_a_counter_reaches_is_refused_before_it_is_touched() {
        let Some(key) = Key::new(&[1; 32]) else { return };
        let (space, ciphertext) = (too_long(), too_long());
        let refusal = |call: &dyn Fn(&mut [u8])| {
            // SAFETY: the pages are mapped and unshared; a write would end this process.
            let data =
                unsafe { std::slice::from_raw_parts_mut(space.as_ptr().cast_mut(), space.len()) };
            let panic = catch_unwind(AssertUnwindSafe(|| call(data))).unwrap_err();
            assert_eq!(panic.downcast_ref(), Some(&"longer than GCM allows"));
        };
        refusal(&|data| assert_ne!(key.seal(&[0; 12], b"", data), [0; 16]));
        refusal(&|data| {
            assert_ne!(key.seal_into(&[0; 12], b"", &ciphertext, data), [0; 16]);
        });
        refusal(&|data| assert!(key.open_in_place(&[0; 12], b"", data, &[0; 16]).is_err()));
        refusal(&|data| assert!(key.open(&[0; 12], b"", &ciphertext, &[0; 16], data).is_err()));
    }
}
