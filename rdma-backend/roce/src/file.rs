//! Frames in a pcapng file.

use std::io::{self, Write};
use std::time::Duration;

use pcap_file::pcapng::PcapNgWriter;
use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::{DataLink, PcapError};

/// A pcapng file of Ethernet frames, with times in nanoseconds.
pub struct File<W: Write> {
    to: PcapNgWriter<W>,
}

fn failed(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}

impl<W: Write> File<W> {
    /// Begins a file.
    ///
    /// # Errors
    /// The writer's.
    pub fn new(to: W) -> io::Result<Self> {
        let mut to = PcapNgWriter::new(to).map_err(failed)?;
        let mut interface = InterfaceDescriptionBlock::new(DataLink::ETHERNET, 0);
        // Nanoseconds.
        interface.options.push(InterfaceDescriptionOption::IfTsResol(9));
        to.write_pcapng_block(interface).map_err(failed)?;
        Ok(Self { to })
    }

    /// Appends a frame that was seen at this time, with a comment for whoever looks at it.
    ///
    /// # Errors
    /// The writer's.
    pub fn write(&mut self, at: Duration, frame: &[u8], comment: Option<&str>) -> io::Result<()> {
        let packet = EnhancedPacketBlock {
            interface_id: 0,
            timestamp: at,
            original_len: u32::try_from(frame.len()).unwrap_or(u32::MAX),
            data: frame.into(),
            options: comment.map(|text| EnhancedPacketOption::Comment(text.into())).into_iter().collect(),
        };
        self.to.write_pcapng_block(packet).map_err(failed)?;
        Ok(())
    }

    /// Writes out what the writer holds back.
    ///
    /// # Errors
    /// The writer's.
    pub fn flush(&mut self) -> io::Result<()> {
        self.to.get_mut().flush()
    }
}
