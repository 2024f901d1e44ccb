//! A strict check of the RESP that the suite sends: no target is blamed for the suite's mistake. It
//! examines each byte once, and keeps at most a line. An incomplete command is valid: a case may
//! disconnect within one.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// From a client: arrays of strings, and inline commands.
    Commands,
    Replies,
}

const LONGEST_LINE: usize = 64 << 10;
/// The longest string, and the longest array: those of Valkey.
const LONGEST: u64 = 512 << 20;

#[derive(Debug)]
pub(super) struct Said {
    dialect: Dialect,
    line: Vec<u8>,
    /// Missing bytes of a string, including its end of two bytes.
    string: u64,
    /// Missing elements of each open array, the innermost last.
    arrays: Vec<u64>,
}

impl Said {
    pub(super) const fn new(dialect: Dialect) -> Self {
        Self { dialect, line: Vec::new(), string: 0, arrays: Vec::new() }
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// They are not RESP.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<(), String> {
        while let Some(first) = bytes.first() {
            if self.string > 2 {
                let inside = usize::try_from(self.string - 2).unwrap_or(usize::MAX).min(bytes.len());
                bytes = &bytes[inside..];
                self.string -= inside as u64;
                continue;
            }
            if self.string > 0 {
                let end = if self.string == 2 { b'\r' } else { b'\n' };
                if *first != end {
                    return Err(format!("{first:#04x} stands where a string ends"));
                }
                self.string -= 1;
                if self.string == 0 {
                    self.is_whole();
                }
                bytes = &bytes[1..];
                continue;
            }
            let end = bytes.iter().position(|byte| *byte == b'\n').map_or(bytes.len(), |at| at + 1);
            let (part, rest) = bytes.split_at(end);
            self.line.extend_from_slice(part);
            bytes = rest;
            if self.line.len() > LONGEST_LINE {
                return Err("a line is too long".into());
            }
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.line(&line).ok_or_else(|| format!("{:?} is no line", String::from_utf8_lossy(&line)))?;
            }
        }
        Ok(())
    }

    /// Takes a line; `None` if it is not allowed here.
    fn line(&mut self, line: &[u8]) -> Option<()> {
        let text = std::str::from_utf8(line.strip_suffix(b"\r\n")?).ok()?;
        if text.contains('\r') {
            return None;
        }
        let kind = text.chars().next().filter(char::is_ascii)?;
        let rest = text.get(1..)?;
        let within = !self.arrays.is_empty();
        match (self.dialect, kind) {
            (Dialect::Commands, '*') if !within => self.arrays.push(length(rest).filter(|count| *count > 0)?),
            (Dialect::Commands, '$') if within => self.string = length(rest)? + 2,
            (Dialect::Commands, 'A'..='Z' | 'a'..='z') if !within => {}
            (Dialect::Commands, _) => return None,
            (Dialect::Replies, '$' | '*') if rest == "-1" => self.is_whole(),
            (Dialect::Replies, '$' | '!' | '=') => self.string = length(rest)? + 2,
            (Dialect::Replies, '*' | '~' | '>' | '%') => match length(rest)? {
                0 => self.is_whole(),
                pairs if kind == '%' => self.arrays.push(2 * pairs),
                count => self.arrays.push(count),
            },
            (Dialect::Replies, ':') => {
                number(rest.strip_prefix('-').unwrap_or(rest))?;
                self.is_whole();
            }
            (Dialect::Replies, '+' | '-' | '_' | '#' | ',' | '(') => self.is_whole(),
            (Dialect::Replies, _) => return None,
        }
        Some(())
    }

    /// Completes an element, and each array that ends with it.
    fn is_whole(&mut self) {
        while let Some(missing) = self.arrays.last_mut() {
            *missing -= 1;
            if *missing > 0 {
                return;
            }
            self.arrays.pop();
        }
    }
}

fn length(text: &str) -> Option<u64> {
    number(text).filter(|length| *length <= LONGEST)
}

/// Reads a number in its required form, without a needless leading zero.
fn number(text: &str) -> Option<u64> {
    let value: u64 = text.parse().ok()?;
    (value <= i64::MAX as u64 && value.to_string() == text).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(dialect: Dialect, bytes: &[u8], piece: usize) -> Result<(), String> {
        let mut said = Said::new(dialect);
        bytes.chunks(piece).try_for_each(|piece| said.take(piece))
    }

    #[test]
    fn what_is_right_passes_however_it_is_cut() {
        for (dialect, bytes) in [
            (Dialect::Commands, &b"*2\r\n$4\r\nECHO\r\n$0\r\n\r\nPING\r\n*1\r\n$4\r\nQUIT\r\n"[..]),
            (Dialect::Commands, b"*2\r\n$4\r\nECHO\r\n$15\r\n\r\n and \n\r\0 more\r\n*1\r\n$4"),
            (Dialect::Replies, b"+OK\r\n-ERR no\r\n:-12\r\n:0\r\n$-1\r\n*-1\r\n*0\r\n$5\r\n\r\n\r\n\0\r\n"),
            (Dialect::Replies, b"*2\r\n*1\r\n:1\r\n*2\r\n$0\r\n\r\n$-1\r\n+OK\r\n%1\r\n+a\r\n_\r\n:18"),
        ] {
            for piece in 1..=bytes.len() {
                assert_eq!(take(dialect, bytes, piece), Ok(()), "{:?}", String::from_utf8_lossy(bytes));
            }
        }
    }

    #[test]
    fn what_is_wrong_is_found() {
        let long = [&b"*2\r\n$4\r\nECHO\r\n$3\r\nfour\r\n"[..], &[b'x'; 100]].concat();
        for (dialect, bytes) in [
            (Dialect::Commands, &long[..]),
            (Dialect::Commands, b"*2\r\n$4\r\nECHO\r\n$5\r\nfour\r\n*1\r\n"),
            (Dialect::Commands, b"*01\r\n"),
            (Dialect::Commands, b"*0\r\n"),
            (Dialect::Commands, b"*-1\r\n"),
            (Dialect::Commands, b"*1\r\n:4\r\n"),
            (Dialect::Commands, b"*1\r\n$+4\r\n"),
            (Dialect::Commands, b"*1\n"),
            (Dialect::Commands, b"$4\r\n"),
            (Dialect::Commands, b"\0"),
            (Dialect::Commands, b"+OK\r\n"),
            (Dialect::Commands, b"PING\n"),
            (Dialect::Replies, b"PONG\r\n"),
            (Dialect::Replies, b"+O\rK\r\n"),
            (Dialect::Replies, b"$-2\r\n"),
            (Dialect::Replies, b"$99999999999999999999999\r\n"),
            (Dialect::Replies, b":007\r\n"),
            (Dialect::Replies, b":--7\r\n"),
            (Dialect::Replies, b"\r\n"),
        ] {
            let bytes = [bytes, b"\r\n\r\n"].concat();
            for piece in [1, 2, 3, bytes.len()] {
                assert!(take(dialect, &bytes, piece).is_err(), "{:?}", String::from_utf8_lossy(&bytes));
            }
        }
    }
}
