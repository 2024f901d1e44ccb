//! Copies between memory of this process and memory that a device may write meanwhile, at the speed of `memcpy(3)`.
//!
//! The code that the compiler makes of a plain copy assumes that nobody else writes the bytes, so it must not be used on memory that a
//! peer reaches. [`SharedMemory`](rdma_proto::memory::SharedMemory) copies words by relaxed atomics instead, which is sound and
//! takes about three times as long in cache. Here the compiler sees no copy at all, only an assembly block that reads and writes
//! memory it knows nothing of. What that block does could be written as relaxed atomic loads and stores of single bytes: each byte
//! is taken once, and a byte that changes meanwhile is taken before or after its change.

use core::arch::asm;

/// From this length on `rep movsb` is as fast as anything else, on processors with ERMS (Intel's optimization manual, 3.7.6). On
/// others it may take a byte at a time.
const LONG: usize = 1024;

/// Copies `len` bytes.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, and they do not overlap. Of both, this process reaches at most one
/// otherwise than by reference to the caller, and then through atomics or this function only.
#[inline]
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        if len >= LONG && is_x86_feature_detected!("ermsb") {
            copy_string(from, to, len);
        } else {
            copy_words(from, to, len);
        }
    }
}

/// Does [`copy`] by the string instruction.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_string(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: the string instruction reads `rcx` bytes at `rsi` and writes them at `rdi`, which the caller allows. The direction
    // flag is clear on entry to every assembly block (Rust reference, inline assembly, rules).
    unsafe {
        asm!("rep movsb", inout("rsi") from => _, inout("rdi") to => _, inout("rcx") len => _,
            options(nostack, preserves_flags));
    }
}

/// Does [`copy`] by loads and stores of up to 16 bytes.
///
/// # Safety
/// As [`copy`].
#[inline]
unsafe fn copy_words(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: every load and store below lies within the `len` bytes that the caller allows: 64 bytes are taken while that many are
    // left, then the powers of two that make up the rest. `movups` needs no alignment, and SSE2 is part of x86_64.
    unsafe {
        asm!(
            "sub {len}, 64",
            "jb 3f",
            "2:",
            "movups {a}, [{from}]",
            "movups {b}, [{from} + 16]",
            "movups {c}, [{from} + 32]",
            "movups {d}, [{from} + 48]",
            "movups [{to}], {a}",
            "movups [{to} + 16], {b}",
            "movups [{to} + 32], {c}",
            "movups [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "sub {len}, 64",
            "jae 2b",
            "3:",
            "add {len}, 64",
            "jz 9f",
            "test {len}, 32",
            "jz 4f",
            "movups {a}, [{from}]",
            "movups {b}, [{from} + 16]",
            "movups [{to}], {a}",
            "movups [{to} + 16], {b}",
            "add {from}, 32",
            "add {to}, 32",
            "4:",
            "test {len}, 16",
            "jz 5f",
            "movups {a}, [{from}]",
            "movups [{to}], {a}",
            "add {from}, 16",
            "add {to}, 16",
            "5:",
            "test {len}, 8",
            "jz 6f",
            "mov {w}, [{from}]",
            "mov [{to}], {w}",
            "add {from}, 8",
            "add {to}, 8",
            "6:",
            "test {len}, 4",
            "jz 7f",
            "mov {w:e}, [{from}]",
            "mov [{to}], {w:e}",
            "add {from}, 4",
            "add {to}, 4",
            "7:",
            "test {len}, 2",
            "jz 8f",
            "movzx {w:e}, word ptr [{from}]",
            "mov [{to}], {w:x}",
            "add {from}, 2",
            "add {to}, 2",
            "8:",
            "test {len}, 1",
            "jz 9f",
            "movzx {w:e}, byte ptr [{from}]",
            "mov [{to}], {w:l}",
            "9:",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            len = inout(reg) len => _,
            w = out(reg) _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length around each step of the copy, at every alignment of both sides, with what lies around it left alone.
    #[test]
    fn exactly_the_bytes_asked_for_are_copied() {
        let from: Vec<u8> = (0..4096_u32).map(|at| (at * 7 + at / 251) as u8).collect();
        type Way = unsafe fn(*const u8, *mut u8, usize);
        let ways: [(&str, Way); 3] =
            [("as it is chosen", copy), ("by the string instruction", copy_string), ("by words", copy_words)];
        for (how, copy) in ways {
            for len in (0..=260).chain([511, 512, 1000, 1023, 1024, 1025, 3000]) {
                for (skip, gap) in [(0, 0), (1, 0), (0, 1), (3, 5), (8, 8), (15, 2), (16, 33)] {
                    let mut to = vec![0xa5; 4096];
                    // SAFETY: at most 3000 bytes behind at most 33 in buffers of 4096, which are two, and borrowed by nobody else.
                    unsafe { copy(from.as_ptr().add(skip), to.as_mut_ptr().add(gap), len) };
                    let (before, rest) = to.split_at(gap);
                    let (copied, after) = rest.split_at(len);
                    let told = format!("{how}: {len} bytes, {skip}, {gap}");
                    assert_eq!(copied, from.get(skip..skip + len).unwrap_or_default(), "{told}");
                    assert!(before.iter().chain(after).all(|byte| *byte == 0xa5), "{told}");
                }
            }
        }
    }
}
