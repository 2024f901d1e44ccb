//! Copies by assembly blocks, about as fast as `memcpy(3)` (`benches/RESULTS.md`).
//!
//! The compiler sees only a block that reads and writes unknown memory: relaxed atomic loads and
//! stores of single bytes. Each is read once, before or after a concurrent change.
#![allow(unsafe_code)]

use core::arch::asm;
use core::sync::atomic::AtomicU8;

/// Copies the bytes of `from` to `into`, up to the shorter length.
#[inline]
pub(crate) fn out(from: &[AtomicU8], into: &mut [u8]) {
    // SAFETY: the shorter length of both. `into` is borrowed exclusively, so it does not overlap.
    unsafe { copy(from.as_ptr().cast(), into.as_mut_ptr(), from.len().min(into.len())) };
}

#[inline]
pub(crate) fn into(from: &[u8], to: &[AtomicU8]) {
    // SAFETY: the shorter length of both. The bytes of `to` are atomics, so they may be written,
    // and `from`, whose bytes are not, does not overlap them.
    unsafe { copy(from.as_ptr(), to.as_ptr().cast_mut().cast(), from.len().min(to.len())) };
}

#[inline]
pub(crate) fn across(from: &[AtomicU8], to: &[AtomicU8]) {
    // SAFETY: the shorter length of both. The bytes of `to` are atomics, so they may be written.
    unsafe { copy(from.as_ptr().cast(), to.as_ptr().cast_mut().cast(), from.len().min(to.len())) };
}

/// Copies `len` bytes.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes. Others in this process must access
/// these bytes through atomics.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: as the caller promises.
    unsafe {
        if len < wide::LONG {
            copy_words(from, to, len);
        } else if len >= string::LONG && processor::has(processor::ERMS) && !string::is_slow(from, to) {
            string::copy(from, to, len);
        } else if processor::has(processor::AVX) {
            wide::copy(from, to, len);
        } else {
            copy_words(from, to, len);
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod processor {
    use core::arch::asm;
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    use core::sync::atomic::{AtomicU8, Ordering::Relaxed};

    pub(super) const ERMS: u8 = 1;
    // 32-byte registers, which the system saves.
    pub(super) const AVX: u8 = 2;
    const KNOWN: u8 = 4;

    /// 0 before the CPU was queried, which takes a trap in a virtual machine.
    static ABLE: AtomicU8 = AtomicU8::new(0);

    #[inline]
    pub(super) fn has(what: u8) -> bool {
        let known = match ABLE.load(Relaxed) {
            0 => ask(),
            known => known,
        };
        known & what != 0
    }

    #[cold]
    #[allow(unused_unsafe, reason = "the functions are safe from some version of Rust on")]
    fn ask() -> u8 {
        let mut able = KNOWN;
        // SAFETY: every x86-64 has CPUID, whose leaf 0 tells the others (Intel's manual, volume
        // 2A): bit 9 of EBX of leaf 7 is ERMS, bits 28 and 27 of ECX of leaf 1 AVX and XGETBV. Bits
        // 1 and 2 of XGETBV are the saved state that AVX needs (volume 1, 14.3).
        unsafe {
            if __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ebx & (1 << 9) != 0 {
                able |= ERMS;
            }
            const BOTH: u32 = 1 << 28 | 1 << 27;
            if __cpuid(1).ecx & BOTH == BOTH {
                let kept: u32;
                asm!("xgetbv", in("ecx") 0, out("eax") kept, out("edx") _, options(nomem, nostack, preserves_flags));
                if kept & 6 == 6 {
                    able |= AVX;
                }
            }
        }
        ABLE.store(able, Relaxed);
        able
    }
}

#[cfg(target_arch = "x86_64")]
mod string {
    use core::arch::asm;

    /// From here on `rep movsb` is fastest with ERMS (Intel's optimization manual, 3.7.6; glibc
    /// uses it). Other processors may copy single bytes.
    pub(super) const LONG: usize = 2048;

    /// `rep movsb` may be many times slower if the target is less than a line after the source,
    /// ignoring pages (glibc's bug 30994; 18 times in `benches/RESULTS.md`).
    #[inline]
    pub(super) fn is_slow(from: *const u8, to: *mut u8) -> bool {
        const PAGE: usize = 4096;
        const LINE: usize = 64;
        (1..LINE).contains(&(to.addr().wrapping_sub(from.addr()) & (PAGE - 1)))
    }

    /// # Safety
    /// The requirements of [`copy`](super::copy) apply.
    #[inline]
    pub(super) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
        // SAFETY: it reads `rcx` bytes at `rsi` and writes them at `rdi`, as the caller allows. The
        // direction flag is clear on entry to assembly (Rust reference, inline assembly, rules).
        unsafe {
            asm!("rep movsb", inout("rsi") from => _, inout("rdi") to => _, inout("rcx") len => _,
                options(nostack, preserves_flags));
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod wide {
    use core::arch::asm;

    /// From this length on, a query of the CPU pays off.
    pub(super) const LONG: usize = 256;

    /// Copies 32 bytes at once, 128 in a turn, and the rest by up to 16.
    ///
    /// # Safety
    /// The requirements of [`copy`](super::copy) apply, and the processor must have AVX.
    pub(super) unsafe fn copy(mut from: *const u8, mut to: *mut u8, len: usize) {
        let (whole, rest) = (len & !127, len & 127);
        if whole > 0 {
            // SAFETY: each load and store lies within the first `whole` bytes. The caller allows
            // these and the instructions. `vmovups` needs no alignment. `vzeroupper` changes the
            // upper halves of the first sixteen vector registers, all declared as changed.
            unsafe {
                asm!(
                    "2:",
                    "vmovups ymm0, [{from}]",
                    "vmovups ymm1, [{from} + 32]",
                    "vmovups ymm2, [{from} + 64]",
                    "vmovups ymm3, [{from} + 96]",
                    "vmovups [{to}], ymm0",
                    "vmovups [{to} + 32], ymm1",
                    "vmovups [{to} + 64], ymm2",
                    "vmovups [{to} + 96], ymm3",
                    "add {from}, 128",
                    "add {to}, 128",
                    "sub {left}, 128",
                    "jnz 2b",
                    "vzeroupper",
                    from = inout(reg) from,
                    to = inout(reg) to,
                    left = inout(reg) whole => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nostack),
                );
            }
        }
        // SAFETY: the last `rest` bytes of those that the caller allows.
        unsafe { super::copy_words(from, to, rest) };
    }
}

/// Copies with loads and stores of up to 16 bytes.
///
/// # Safety
/// The requirements of [`copy`] apply.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy_words(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: every load and store lies within `len` bytes: 64 are copied while that many remain,
    // then the powers of two of the rest. `movups` needs no alignment; x86_64 includes SSE2.
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

/// Copies with loads and stores of up to 32 bytes.
///
/// # Safety
/// `from` must be readable and `to` writable for `len` bytes. Others in this process must access
/// these bytes through atomics.
#[cfg(target_arch = "aarch64")]
#[inline]
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    // SAFETY: every load and store lies within `len` bytes: 64 are copied while that many remain,
    // then the powers of two of the rest. None needs alignment in normal memory.
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
            // The low six bits are those of the remainder.
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

    /// Every length around each step, at every alignment of both; surrounding bytes stay.
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
            #[cfg(target_arch = "x86_64")]
            ("by words of 32 bytes", wide::copy),
        ];
        for &(how, copy) in ways {
            #[cfg(target_arch = "x86_64")]
            if how.ends_with("32 bytes") && !processor::has(processor::AVX) {
                continue;
            }
            for len in (0..=260).chain([511, 512, 1000, 1024, 2047, 2048, 2049, 3000]) {
                for (skip, gap) in [(0, 0), (1, 0), (0, 1), (3, 5), (8, 8), (15, 2), (16, 33)] {
                    let mut to = vec![0xa5; 4096];
                    // SAFETY: at most 3000 bytes after 33, in two buffers of 4096, not borrowed
                    // elsewhere.
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
