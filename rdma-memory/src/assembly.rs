//! Copies by assembly blocks, as fast as `memcpy(3)` for up to 64 KiB (`benches/RESULTS.md`).
//!
//! The compiler sees no copy at all, only a block that reads and writes memory it knows nothing of. What the block does could be
//! written as relaxed atomic loads and stores of single bytes: each byte is taken once, and a byte that changes meanwhile is taken
//! before or after its change.
#![allow(unsafe_code)]

use core::arch::asm;
use core::sync::atomic::AtomicU8;

/// Copies the bytes of `from` to `into`, as far as both go.
#[inline]
pub(crate) fn out(from: &[AtomicU8], into: &mut [u8]) {
    // SAFETY: as many bytes as both have; `into` is borrowed by nobody else, and so lies elsewhere.
    unsafe { copy(from.as_ptr().cast(), into.as_mut_ptr(), from.len().min(into.len())) };
}

/// Copies the bytes of `from` to `to`, as far as both go.
#[inline]
pub(crate) fn into(from: &[u8], to: &[AtomicU8]) {
    // SAFETY: as many bytes as both have; those of `to` may be written through a shared reference, since they are atomics, and `from`
    // has none of them, since it is not.
    unsafe { copy(from.as_ptr(), to.as_ptr().cast_mut().cast(), from.len().min(to.len())) };
}

/// Copies the bytes of `from` to `to`, as far as both go.
#[inline]
pub(crate) fn across(from: &[AtomicU8], to: &[AtomicU8]) {
    // SAFETY: as many bytes as both have; those of `to` may be written through a shared reference, since they are atomics.
    unsafe { copy(from.as_ptr().cast(), to.as_ptr().cast_mut().cast(), from.len().min(to.len())) };
}

/// Copies `len` bytes.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, as far as this process goes by atomics wherever others reach them.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        if len >= string::LONG && string::is_fast() {
            string::copy(from, to, len);
        } else {
            copy_words(from, to, len);
        }
    }
}

/// The string instruction of x86-64.
#[cfg(target_arch = "x86_64")]
mod string {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

    /// From this length on `rep movsb` is as fast as anything else, on processors with ERMS (Intel's optimization manual, 3.7.6), and used
    /// by glibc, where it copies by words of 16 bytes otherwise. On others it may take a byte at a time.
    pub(super) const LONG: usize = 2048;

    const NO: u8 = 1;
    const YES: u8 = 2;

    /// What the processor has said; 0 before it was asked, which takes a trap in a virtual machine.
    static ERMS: AtomicU8 = AtomicU8::new(0);

    /// Returns whether the processor has ERMS.
    #[inline]
    pub(super) fn is_fast() -> bool {
        match ERMS.load(Relaxed) {
            0 => ask(),
            known => known == YES,
        }
    }

    #[cold]
    #[allow(unused_unsafe, reason = "the functions are safe from some version of Rust on")]
    fn ask() -> bool {
        // SAFETY: every x86-64 has the instruction, and leaf 0 tells which others there are. Bit 9 of EBX of leaf 7 is ERMS (Intel's
        // manual, volume 2A, CPUID).
        let has = unsafe { __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ebx & (1 << 9) != 0 };
        ERMS.store(if has { YES } else { NO }, Relaxed);
        has
    }

    /// Does [`copy`](super::copy) by the string instruction.
    ///
    /// # Safety
    /// As there.
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: the string instruction reads `rcx` bytes at `rsi` and writes them at `rdi`, which the caller allows. The direction
        // flag is clear on entry to every assembly block (Rust reference, inline assembly, rules).
        unsafe {
            asm!("rep movsb", inout("rsi") from => _, inout("rdi") to => _, inout("rcx") len => _,
                options(nostack, preserves_flags));
        }
    }
}

/// Does [`copy`] by loads and stores of up to 16 bytes.
///
/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
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

/// Copies `len` bytes by loads and stores of up to 32.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, as far as this process goes by atomics wherever others reach them.
#[cfg(target_arch = "aarch64")]
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: every load and store below lies within the `len` bytes that the caller allows: 64 bytes are taken while that many are
    // left, then the powers of two that make up the rest. None needs alignment in normal memory.
    unsafe {
        asm!(
            "subs {len}, {len}, #64",
            "b.lo 3f",
            "2:",
            "ldp {a:q}, {b:q}, [{from}], #32",
            "ldp {c:q}, {d:q}, [{from}], #32",
            "stp {a:q}, {b:q}, [{to}], #32",
            "stp {c:q}, {d:q}, [{to}], #32",
            "subs {len}, {len}, #64",
            "b.hs 2b",
            "3:",
            // The low six bits are those of what is left.
            "tbz {len}, #5, 4f",
            "ldp {a:q}, {b:q}, [{from}], #32",
            "stp {a:q}, {b:q}, [{to}], #32",
            "4:",
            "tbz {len}, #4, 5f",
            "ldr {a:q}, [{from}], #16",
            "str {a:q}, [{to}], #16",
            "5:",
            "tbz {len}, #3, 6f",
            "ldr {w}, [{from}], #8",
            "str {w}, [{to}], #8",
            "6:",
            "tbz {len}, #2, 7f",
            "ldr {w:w}, [{from}], #4",
            "str {w:w}, [{to}], #4",
            "7:",
            "tbz {len}, #1, 8f",
            "ldrh {w:w}, [{from}], #2",
            "strh {w:w}, [{to}], #2",
            "8:",
            "tbz {len}, #0, 9f",
            "ldrb {w:w}, [{from}]",
            "strb {w:w}, [{to}]",
            "9:",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            len = inout(reg) len => _,
            w = out(reg) _,
            a = out(vreg) _,
            b = out(vreg) _,
            c = out(vreg) _,
            d = out(vreg) _,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;
    use std::{format, vec};

    use super::*;

    /// Every length around each step of the copy, at every alignment of both sides, with what lies around it left alone.
    #[test]
    fn exactly_the_bytes_asked_for_are_copied() {
        let from: Vec<u8> = (0..4096_u32).map(|at| (at * 7 + at / 251) as u8).collect();
        type Way = unsafe fn(*const u8, *mut u8, usize);
        let ways: &[(&str, Way)] = &[
            ("as it is chosen", copy),
            #[cfg(target_arch = "x86_64")]
            ("by the string instruction", string::copy),
            #[cfg(target_arch = "x86_64")]
            ("by words", copy_words),
        ];
        for &(how, copy) in ways {
            for len in (0..=260).chain([511, 512, 1000, 1024, 2047, 2048, 2049, 3000]) {
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
