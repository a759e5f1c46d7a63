//! Element-wise reduction of bfloat16, so that jobs need no array library for it: each pair is
//! widened to single precision, combined, and rounded once, to nearest even.

/// How two elements are combined. If either is NaN, so is the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduction {
    /// a + b.
    Sum,
    /// The larger one.
    Maximum,
    /// The smaller one.
    Minimum,
    /// a · b.
    Product,
}

/// Combines each element of `from` into the corresponding one of `into`; both hold bfloat16 bits.
///
/// # Panics
/// If the lengths differ.
pub fn reduce_bfloat16(into: &mut [u16], from: &[u16], reduction: Reduction) {
    assert_eq!(into.len(), from.len(), "the slices must have equal lengths");
    match reduction {
        Reduction::Sum => combine(into, from, |a, b| a + b),
        Reduction::Product => combine(into, from, |a, b| a * b),
        Reduction::Maximum => combine(into, from, |a, b| if a > b || a.is_nan() { a } else { b }),
        Reduction::Minimum => combine(into, from, |a, b| if a < b || a.is_nan() { a } else { b }),
    }
}

/// Multiplies each element.
pub fn scale_bfloat16(elements: &mut [u16], factor: f32) {
    for element in elements {
        *element = narrow(widen(*element) * factor);
    }
}

#[inline]
fn combine(into: &mut [u16], from: &[u16], operation: impl Fn(f32, f32) -> f32) {
    for (a, b) in into.iter_mut().zip(from) {
        *a = narrow(operation(widen(*a), widen(*b)));
    }
}

#[inline]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[inline]
fn narrow(value: f32) -> u16 {
    let bits = value.to_bits();
    // Adds half of the last kept place, less one if that place is even. A NaN stays a NaN.
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
    if value.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded as u16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_survives_and_halves_go_to_even() {
        for bits in 0..=u16::MAX {
            let value = widen(bits);
            assert!(narrow(value) == bits || value.is_nan() && widen(narrow(value)).is_nan());
        }
        assert_eq!(narrow(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(narrow(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(narrow(f32::from_bits(0x3F80_8001)), 0x3F81);
        assert_eq!(narrow(f32::MAX), 0x7F80, "as in single precision, overflow gives infinity");
    }

    #[test]
    fn pairs_are_combined_in_single_precision() {
        let (a, b) = (narrow(256.0), narrow(1.0));
        let reduced = |x, y, reduction| {
            let mut into = [x];
            reduce_bfloat16(&mut into, &[y], reduction);
            widen(into[0])
        };
        assert!((reduced(a, b, Reduction::Sum) - 256.0).abs() < f32::EPSILON);
        assert!((reduced(a, narrow(3.0), Reduction::Sum) - 260.0).abs() < f32::EPSILON);
        assert!((reduced(a, b, Reduction::Maximum) - 256.0).abs() < f32::EPSILON);
        assert!((reduced(a, b, Reduction::Minimum) - 1.0).abs() < f32::EPSILON);
        assert!((reduced(a, a, Reduction::Product) - 65536.0).abs() < f32::EPSILON);
        for reduction in
            [Reduction::Sum, Reduction::Maximum, Reduction::Minimum, Reduction::Product]
        {
            assert!(reduced(0x7FC0, b, reduction).is_nan());
            assert!(reduced(b, 0x7FC0, reduction).is_nan());
        }
        let mut thirds = [narrow(3.0)];
        scale_bfloat16(&mut thirds, 1.0 / 2.0);
        assert!((widen(thirds[0]) - 1.5).abs() < f32::EPSILON);
    }
}
