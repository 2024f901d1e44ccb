//! A walk over an RDB, from piece to piece of its grammar.

use super::grammar::{COMPRESSED, Step, opcode, value};
use super::{Invalid, Needs};

/// Bytes of the beginning: a name, and the version in digits.
const HEADER: usize = 9;

/// The most bytes that a compressed byte stands for: 264 are repeated by three.
const MOST_UNPACKED: u64 = 88;

/// The expected next piece.
#[derive(Clone, Copy)]
enum Due {
    Header,
    Opcode,
    Step(Step),
}

/// Steps that are left of a piece.
struct Frame {
    steps: &'static [Step],
    at: usize,
    /// How often they come, this time included.
    times: u64,
}

/// The state between two bytes. Its size has a bound, whatever the RDB says: the grammar nests five
/// deep.
pub(super) struct Walk {
    due: Due,
    frames: Vec<Frame>,
    /// Bytes to pass over.
    skip: u64,
    /// The beginning of the due piece, as far as it has come.
    item: [u8; HEADER],
    come: usize,
    /// The length of the compressed string.
    packed: u64,
    bytes: u64,
    needs: Needs,
    is_over: bool,
}

impl Default for Walk {
    fn default() -> Self {
        Self {
            due: Due::Header,
            frames: Vec::new(),
            skip: 0,
            item: [0; HEADER],
            come: 0,
            packed: 0,
            bytes: 0,
            needs: Needs { version: 0, database: 0, module: None },
            is_over: false,
        }
    }
}

impl Walk {
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    #[cfg(test)]
    pub(super) fn depth(&self) -> usize {
        self.frames.len()
    }

    /// Returns what the RDB needs, once its end has come.
    pub(super) fn end(&self) -> Option<Needs> {
        self.is_over.then_some(self.needs)
    }

    /// Walks over bytes, up to the checksum. Returns how many it has walked over.
    pub(super) fn take(&mut self, bytes: &[u8]) -> Result<usize, Invalid> {
        let mut rest = bytes;
        while !self.is_over {
            if self.skip > 0 {
                let skipped = usize::try_from(self.skip).unwrap_or(usize::MAX).min(rest.len());
                rest = rest.get(skipped..).unwrap_or_default();
                self.skip = self.skip.saturating_sub(skipped as u64);
                self.bytes = self.bytes.saturating_add(skipped as u64);
                if self.skip > 0 {
                    break;
                }
            }
            if let Due::Step(Step::Bytes(count)) = self.due {
                self.skip = count;
                self.due = self.next();
                continue;
            }
            if !self.gather(&mut rest) {
                break;
            }
            self.come = 0;
            self.arrive()?;
        }
        Ok(bytes.len().saturating_sub(rest.len()))
    }

    /// Takes the beginning of the due piece. Returns whether all of it has come.
    fn gather(&mut self, rest: &mut &[u8]) -> bool {
        while self.come < self.wanted() {
            let (Some((byte, behind)), Some(place)) = (rest.split_first(), self.item.get_mut(self.come))
            else {
                return false;
            };
            *place = *byte;
            *rest = behind;
            self.come += 1;
            self.bytes = self.bytes.saturating_add(1);
        }
        true
    }

    /// Returns the length of the beginning of the due piece, as far as it is known.
    const fn wanted(&self) -> usize {
        match self.due {
            Due::Header => HEADER,
            Due::Opcode | Due::Step(Step::Score) => 1,
            Due::Step(_) if self.come == 0 => 1,
            Due::Step(_) => match self.item[0] {
                0x40..0x80 => 2,
                0x80 => 5,
                0x81 => 9,
                _ => 1,
            },
        }
    }

    fn push(&mut self, steps: &'static [Step], times: u64) {
        if times > 0 {
            self.frames.push(Frame { steps, at: 0, times });
        }
    }

    fn next(&mut self) -> Due {
        while let Some(frame) = self.frames.last_mut() {
            if let Some(step) = frame.steps.get(frame.at) {
                frame.at += 1;
                // What follows the last step is pushed in its place, so that frames do not pile up.
                if frame.at >= frame.steps.len() && frame.times <= 1 {
                    self.frames.pop();
                }
                return Due::Step(*step);
            }
            frame.at = 0;
            frame.times = frame.times.saturating_sub(1);
        }
        Due::Opcode
    }

    fn unknown(&self, what: &'static str) -> Invalid {
        Invalid::Unknown { what, at: self.bytes.saturating_sub(1) }
    }

    fn refused(&self, what: &'static str) -> Invalid {
        Invalid::Refused { what, at: self.bytes.saturating_sub(1) }
    }

    /// Handles the due piece, whose beginning has come.
    fn arrive(&mut self) -> Result<(), Invalid> {
        let [first, ..] = self.item;
        match self.due {
            Due::Header => self.needs.version = version(&self.item)?,
            Due::Opcode => self.opcode(first)?,
            Due::Step(Step::Score) => match first {
                253 => return Err(self.refused("a score that is no number")),
                254 | 255 => {}
                count => self.skip = count.into(),
            },
            Due::Step(step) if first < 0xc0 => {
                let number = self.number()?;
                self.counted(step, number)?;
            }
            Due::Step(Step::Text) => match first & 0x3f {
                0 => self.skip = 1,
                1 => self.skip = 2,
                2 => self.skip = 4,
                3 => self.push(COMPRESSED, 1),
                _ => return Err(self.unknown("a string of an unknown kind")),
            },
            Due::Step(_) => return Err(self.unknown("a string in the place of a number")),
        }
        self.due = self.next();
        Ok(())
    }

    fn opcode(&mut self, code: u8) -> Result<(), Invalid> {
        match code {
            255 => self.is_over = true,
            243 => return Err(self.refused("a move of slots, which only a node of a cluster loads")),
            246 => return Err(self.refused("a library of functions of a release candidate")),
            6 => return Err(self.refused("a module's value of a release candidate")),
            // Another server has given this number to another type.
            22.. if self.needs.version < 80 && value(code).is_some() => {
                return Err(self.unknown("a type of a later version"));
            }
            _ => {
                let steps = opcode(code).or_else(|| value(code));
                self.push(steps.ok_or_else(|| self.unknown("an unknown type"))?, 1);
            }
        }
        Ok(())
    }

    /// Decodes a number.
    fn number(&self) -> Result<u64, Invalid> {
        let [first, second, third, fourth, fifth, rest @ ..] = self.item;
        let [sixth, seventh, eighth, ninth] = rest;
        Ok(match first {
            0..0x40 => first.into(),
            0x40..0x80 => u16::from_be_bytes([first & 0x3f, second]).into(),
            0x80 => u32::from_be_bytes([second, third, fourth, fifth]).into(),
            0x81 => u64::from_be_bytes([second, third, fourth, fifth, sixth, seventh, eighth, ninth]),
            _ => return Err(self.unknown("a number of an unknown length")),
        })
    }

    /// Handles a step that begins with a number.
    fn counted(&mut self, step: Step, number: u64) -> Result<(), Invalid> {
        match step {
            Step::Text => self.skip = number,
            Step::Times(steps) => self.push(steps, number),
            Step::Database => self.needs.database = self.needs.database.max(number),
            Step::Module => {
                self.needs.module.get_or_insert(type_name(number));
            }
            Step::Parts => {
                let part: &[Step] = match number {
                    0 => return Ok(()),
                    1 | 2 => &[Step::Number, Step::Parts],
                    3 => &[Step::Bytes(4), Step::Parts],
                    4 => &[Step::Bytes(8), Step::Parts],
                    5 => &[Step::Text, Step::Parts],
                    _ => return Err(self.unknown("a part of an unknown kind in a module's value")),
                };
                self.push(part, 1);
            }
            Step::Packed => self.packed = number,
            Step::Unpacked if number > self.packed.saturating_mul(MOST_UNPACKED) => {
                return Err(self.refused("a compressed string that claims to be longer than it can be"));
            }
            Step::Unpacked => self.skip = self.packed,
            Step::Number | Step::Score | Step::Bytes(_) => {}
        }
        Ok(())
    }
}

/// Returns the version of the format, of the beginning of an RDB.
fn version(header: &[u8; HEADER]) -> Result<u16, Invalid> {
    let (is_valkey, digits) = match header {
        [b'R', b'E', b'D', b'I', b'S', digits @ ..] => (false, &digits[..]),
        [b'V', b'A', b'L', b'K', b'E', b'Y', digits @ ..] => (true, &digits[..]),
        _ => return Err(Invalid::Foreign),
    };
    let digit = |so_far: Option<u16>, digit: &u8| {
        let digit = char::from(*digit).to_digit(10)?;
        so_far?.checked_mul(10)?.checked_add(u16::try_from(digit).ok()?)
    };
    match (is_valkey, digits.iter().fold(Some(0), digit).ok_or(Invalid::Foreign)?) {
        (false, version @ 5..=11) | (true, version @ 80) => Ok(version),
        (_, version) => Err(Invalid::Version(version)),
    }
}

/// Returns the name of a module's type, by its id: nine characters of six bits, and a version.
fn type_name(id: u64) -> [u8; 9] {
    const CHARACTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    std::array::from_fn(|at| {
        let character = (id >> (10 + 6 * (8 - at as u64))) & 0x3f;
        CHARACTERS.get(character as usize).copied().unwrap_or(b'?')
    })
}
