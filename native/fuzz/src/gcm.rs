//! Compares the AES-256-GCM kernel with a library.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use sealane_gcm::{Key, NONCE_BYTES, TAG_BYTES};

use crate::script::Script;

/// Kernel and library seal to the same bytes for every key, length and alignment; opening changed
/// bytes fails and leaves zeros.
pub fn gcm(data: &[u8]) {
    let mut script = Script::new(data);
    let secret = std::array::from_fn(|_| script.byte());
    let nonce: [u8; NONCE_BYTES] = std::array::from_fn(|_| script.byte());
    let (aad_bytes, start, flip) = (script.half(), script.byte() % 64, script.half());
    let rest = script.rest();
    let (aad, plaintext) = rest.split_at(usize::from(aad_bytes).min(rest.len()));
    let Some(key) = Key::new(&secret) else { return };
    let unbound = UnboundKey::new(&AES_256_GCM, &secret).expect("key length is fixed");
    let library = LessSafeKey::new(unbound);
    let mut expected = plaintext.to_vec();
    let expected_tag = library
        .seal_in_place_separate_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(aad),
            &mut expected,
        )
        .expect("within the limits of GCM");
    let mut buffer = vec![0; usize::from(start)];
    buffer.extend_from_slice(plaintext);
    let sealed = &mut buffer[usize::from(start)..];
    let mut tag = key.seal(&nonce, aad, sealed);
    assert_eq!((&tag[..], &*sealed), (expected_tag.as_ref(), &expected[..]));
    let mut opened = vec![1; plaintext.len()];
    key.open(&nonce, aad, sealed, &tag, &mut opened).expect("nothing was changed");
    assert_eq!(opened, plaintext);
    let bit = 1 << (flip % 8);
    let at = usize::from(flip / 8) % (sealed.len() + TAG_BYTES);
    match sealed.get_mut(at) {
        Some(byte) => *byte ^= bit,
        None => tag[at % TAG_BYTES] ^= bit,
    }
    assert!(key.open_in_place(&nonce, aad, sealed, &tag).is_err());
    assert!(sealed.iter().all(|byte| *byte == 0));
}
