//! Frames in a pcapng file (draft-ietf-opsawg-pcapng): one section with one interface.

use std::io::{self, Write};
use std::time::Duration;

const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
/// Marks all numbers as little-endian.
const BYTE_ORDER: u32 = 0x1a2b_3c4d;
const ETHERNET: u16 = 1;

const TIME_RESOLUTION: u16 = 9;
const COMMENT: u16 = 1;
const END: u16 = 0;

/// A pcapng file of Ethernet frames, with times in nanoseconds.
pub struct File<W: Write> {
    to: W,
}

impl<W: Write> File<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// Returns the writer's error.
    pub fn new(to: W) -> io::Result<Self> {
        let mut file = Self { to };
        // Version 1.0, of unknown length.
        let section = [&BYTE_ORDER.to_le_bytes()[..], &[1, 0, 0, 0], &[0xff; 8]].concat();
        file.block(SECTION, &section)?;
        // Frames of any length.
        let mut interface = [ETHERNET.to_le_bytes(), [0; 2], [0; 2], [0; 2]].concat();
        // Nanoseconds: ten to the power of minus nine.
        push_option(&mut interface, TIME_RESOLUTION, &[9])?;
        push_option(&mut interface, END, &[])?;
        file.block(INTERFACE, &interface)?;
        Ok(file)
    }

    /// Appends a frame with its time and an optional comment.
    ///
    /// # Errors
    /// Returns the writer's error, or an error if the comment is too long for the format.
    pub fn write(&mut self, at: Duration, frame: &[u8], comment: Option<&str>) -> io::Result<()> {
        let nanos = u64::try_from(at.as_nanos()).map_err(io::Error::other)?;
        let len = u32::try_from(frame.len()).map_err(io::Error::other)?;
        let mut packet = [0, (nanos >> 32) as u32, nanos as u32, len, len].map(u32::to_le_bytes).concat();
        push_padded(&mut packet, frame);
        if let Some(comment) = comment {
            push_option(&mut packet, COMMENT, comment.as_bytes())?;
            push_option(&mut packet, END, &[])?;
        }
        self.block(PACKET, &packet)
    }

    fn block(&mut self, kind: u32, body: &[u8]) -> io::Result<()> {
        let len = u32::try_from(body.len() + 12).map_err(io::Error::other)?;
        self.to.write_all(&[kind, len].map(u32::to_le_bytes).concat())?;
        self.to.write_all(body)?;
        self.to.write_all(&len.to_le_bytes())
    }

    /// Flushes the writer.
    ///
    /// # Errors
    /// Returns the writer's error.
    pub fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

fn push_option(to: &mut Vec<u8>, code: u16, value: &[u8]) -> io::Result<()> {
    let len = u16::try_from(value.len()).map_err(io::Error::other)?;
    to.extend([code, len].map(u16::to_le_bytes).concat());
    push_padded(to, value);
    Ok(())
}

fn push_padded(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend(bytes);
    to.resize(to.len().next_multiple_of(4), 0);
}
