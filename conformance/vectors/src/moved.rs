//! Traces with their windows elsewhere: what happens does not depend on addresses and keys.

use super::data::{Expected, Fields, Hex, Input, Output, Settings, Trace};

/// Addresses around which something could go wrong: half of the bits, a sign, bits of a pointer.
const EDGES: [u64; 4] = [1 << 32, 1 << 63, 1 << 48, 1 << 47];
/// Windows so close to the end of the address space are about that.
const LAST: u64 = u64::MAX - 64;
/// How often a place is drawn before a trace stays as it is.
const DRAWS: usize = 16;

/// Numbers that are the same everywhere.
struct Dice(u64);

impl Dice {
    fn of(seed: u64, id: &str) -> Self {
        Self(id.bytes().fold(seed, |sum, byte| sum.wrapping_mul(257).wrapping_add(byte.into())))
    }

    /// One number of `SplitMix64`.
    const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next().checked_rem(bound).unwrap_or(0)
    }
}

/// How far the windows of one side move, and what changes their keys.
#[derive(Clone, Copy, Default)]
struct Move {
    by: u64,
    key: u64,
}

impl Move {
    /// Draws a place such that the first of `windows` crosses an edge, if it has more than one
    /// byte. The windows stay if they are about the end of the address space.
    fn draw(dice: &mut Dice, windows: &[(u64, u32)]) -> Self {
        let stay = Self::default();
        let ends = |by: u64| {
            windows.iter().map(move |(at, length)| at.wrapping_add(by).checked_add((*length).into()))
        };
        let fits = |by| ends(by).all(|end| end.is_some_and(|end| end < LAST));
        let Some((first, length)) = windows.first().filter(|_| fits(0)) else { return stay };
        let key = dice.next() & u64::from(u32::MAX);
        for _ in 0..DRAWS {
            let edge = match EDGES.get(dice.below(2 * EDGES.len() as u64) as usize) {
                Some(edge) => *edge,
                None => dice.next() & !u64::from(u32::MAX),
            };
            let before = 1 + dice.below(u64::from(length.saturating_sub(1)));
            let by = edge.wrapping_sub(before).wrapping_sub(*first);
            if fits(by) {
                return Self { by, key };
            }
        }
        stay
    }

    fn apply(self, Hex(address): &mut Hex, Hex(rkey): &mut Hex) {
        *address = address.wrapping_add(self.by);
        *rkey ^= self.key;
    }
}

/// Moves the windows of both sides, and changes their keys.
pub(super) fn moved(trace: &mut Trace, seed: u64) {
    let mut dice = Dice::of(seed, &trace.id);
    let Settings { window, address, address2, .. } = trace.settings;
    let own = Move::draw(&mut dice, &[(address.0, window), (address2.0, window)]);
    let theirs: Vec<_> = trace.steps.iter().filter_map(|step| registered(&step.input)).collect();
    let theirs = Move::draw(&mut dice, &theirs);
    let Settings { address, rkey, address2, rkey2, .. } = &mut trace.settings;
    own.apply(address, rkey);
    own.apply(address2, rkey2);
    for step in &mut trace.steps {
        if let Input::Receive { message: Fields::RegisterXferMemory { address, rkey, .. } } = &mut step.input
        {
            theirs.apply(address, rkey);
        }
        let exactly = match &mut step.out {
            Expected::Exactly(outputs) => &mut outputs[..],
            Expected::Anything(_) => &mut [],
        };
        for output in exactly.iter_mut().chain(&mut step.optional) {
            if let Output::Send(Fields::RegisterXferMemory { address, rkey, .. }) = output {
                own.apply(address, rkey);
            }
        }
    }
}

const fn registered(input: &Input) -> Option<(u64, u32)> {
    match input {
        Input::Receive { message: Fields::RegisterXferMemory { address, length, .. } } => {
            Some((address.0, *length))
        }
        _ => None,
    }
}
