//! `valkey-rdma-conformance trace …`.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use crate::exit::BROKEN;
use intercept::trace::{Recording, packets, timeline};
use suite::terminal;

/// Commands on a recording.
#[derive(Subcommand)]
pub enum Command {
    /// Shows it as a timeline: a page for each connection, the client to the left, the server to
    /// the right; below each other where the output is too narrow.
    Show {
        /// The recording.
        file: PathBuf,
    },
    /// Turns it into packets for Wireshark (pcapng, RoCE v2); spec/wireshark has a dissector.
    Pcap {
        /// The recording.
        file: PathBuf,
        /// Where to write them; beside the recording, if absent.
        #[arg(long)]
        out: Option<PathBuf>,
    },
}

/// Runs a command.
pub fn run(command: Command) -> ExitCode {
    match perform(command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            terminal::complain(&problem.to_string(), 4);
            ExitCode::from(BROKEN)
        }
    }
}

fn perform(command: Command) -> io::Result<()> {
    match command {
        Command::Show { file } => {
            let pages = timeline::render(&Recording::open(&file)?);
            print!("{}", timeline::narrow(&pages, terminal::columns()));
        }
        Command::Pcap { file, out } => {
            let out = out.unwrap_or_else(|| file.with_extension("pcapng"));
            let packets = packets::save(&Recording::open(&file)?, &out)?;
            println!("{packets} packets in {}", out.display());
        }
    }
    Ok(())
}
