//! The lab's own programs, until `valkey-rdma-trust` has them: see `trust/src/soak` and `trust/src/vanish.rs`.

#[path = "../../trust/src/soak/mod.rs"]
mod soak;
#[path = "../../trust/src/vanish.rs"]
mod vanish;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "What only two machines, or a device, can show")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Clients and servers for hours, over a network with faults.
    #[command(subcommand)]
    Soak(soak::Command),
    /// How long a server takes to notice a client that vanished.
    Vanish(vanish::Arguments),
}

fn main() -> std::process::ExitCode {
    tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::from_default_env())
        .with_writer(std::io::stderr)
        .init();
    match Arguments::parse().command {
        Command::Soak(command) => soak::run(&command),
        Command::Vanish(arguments) => vanish::run(&arguments),
    }
}
