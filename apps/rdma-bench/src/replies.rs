use std::io::{self, ErrorKind};

/// The most bytes of a line, as in Valkey.
pub(crate) const LONGEST_LINE: usize = 64 << 10;

/// Finds the ends of replies in a byte stream. It keeps no values: that work is not measured.
#[derive(Default)]
pub(crate) struct Replies {
    /// The beginning of an incomplete line.
    line: Vec<u8>,
    /// Remaining bytes of a value, without the end of its line. `None` between replies.
    value: Option<usize>,
}

impl Replies {
    /// Takes one reply off the front of `received`, or all of `received` if the reply is
    /// incomplete. Returns whether it was complete.
    ///
    /// # Errors
    /// The reply is an error, or it is no reply to PING, SET or GET.
    pub(crate) fn take(&mut self, received: &mut &[u8]) -> io::Result<bool> {
        loop {
            if let Some(left) = &mut self.value {
                let here = (*left).min(received.len());
                *left -= here;
                *received = received.get(here..).unwrap_or_default();
            }
            let Some(end) = received.iter().position(|byte| *byte == b'\n') else {
                self.line.extend_from_slice(received);
                *received = &[];
                return if self.line.len() > LONGEST_LINE { Err(none(&self.line)) } else { Ok(false) };
            };
            let (here, rest) = received.split_at(end + 1);
            *received = rest;
            self.line.extend_from_slice(here);
            let ends = self.handle_line();
            self.line.clear();
            if ends? {
                return Ok(true);
            }
        }
    }

    fn handle_line(&mut self) -> io::Result<bool> {
        let Some(line) = self.line.strip_suffix(b"\r\n") else { return Err(none(&self.line)) };
        match (self.value.take(), line) {
            (Some(_), []) | (None, [b'+', ..]) => Ok(true),
            (None, b"$-1") => Err(io::Error::other("a key that was stored is missing")),
            (None, [b'$', digits @ ..]) => {
                let len = std::str::from_utf8(digits).ok().and_then(|text| text.parse().ok());
                self.value = Some(len.ok_or_else(|| none(line))?);
                Ok(false)
            }
            (None, [b'-', text @ ..]) => Err(refused(text)),
            _ => Err(none(line)),
        }
    }
}

pub(crate) fn refused(text: &[u8]) -> io::Error {
    io::Error::other(format!("the server replied {:?}", String::from_utf8_lossy(text)))
}

fn none(line: &[u8]) -> io::Error {
    let begin = String::from_utf8_lossy(line.get(..40).unwrap_or(line));
    io::Error::new(ErrorKind::InvalidData, format!("{begin:?} is no reply to PING, SET or GET"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(all: &[u8], len: usize) -> io::Result<usize> {
        let mut replies = Replies::default();
        let mut found = 0;
        for mut part in all.chunks(len) {
            while replies.take(&mut part)? {
                found += 1;
            }
            assert!(part.is_empty(), "nothing is left behind");
        }
        Ok(found)
    }

    #[test]
    fn replies_are_counted_however_they_come() {
        // Values are not parsed.
        let all = b"$5\r\nhello\r\n+OK\r\n$0\r\n\r\n$7\r\n\r\n+OK\r\n\r\n+PONG\r\n";
        for len in 1..=all.len() {
            assert_eq!(count(all, len).unwrap(), 5, "in parts of {len}");
            assert_eq!(count(&all[..all.len() - 1], len).unwrap(), 4, "in parts of {len}");
        }
    }

    #[test]
    fn what_is_no_fulfilment_is_an_error() {
        let long = [b'+'; LONGEST_LINE + 1];
        for (all, says) in [
            (&b"-ERR no\r\n"[..], r#"the server replied "ERR no""#),
            (b"$-1\r\n", "a key that was stored is missing"),
            (b"$5\r\nhelloo\r\n", r#""o" is no reply to PING, SET or GET"#),
            (b"$x\r\n", r#""$x" is no reply to PING, SET or GET"#),
            (
                b"$99999999999999999999999\r\n",
                r#""$99999999999999999999999" is no reply to PING, SET or GET"#,
            ),
            (b"*1\r\n", r#""*1" is no reply to PING, SET or GET"#),
            (b"+OK\n", r#""+OK\n" is no reply to PING, SET or GET"#),
            (b"\r\n", r#""" is no reply to PING, SET or GET"#),
            (&long, r#""++++++++++++++++++++++++++++++++++++++++" is no reply to PING, SET or GET"#),
        ] {
            for len in [1, 3, all.len()] {
                assert_eq!(count(all, len).unwrap_err().to_string(), says);
            }
        }
    }
}
