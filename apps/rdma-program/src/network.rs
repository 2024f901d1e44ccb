//! Options of command lines for a network and its cards.

use clap::Args;
use rdma_conn::Options;

/// Options of all RDMA connections of a program that a network or a card may want.
#[derive(Args, Clone, Copy, Debug, Default)]
#[command(next_help_heading = "RDMA networks and cards")]
pub struct Network {
    /// Traffic class of the packets of RDMA connections that are dialled: DSCP times 4. By default
    /// the system's. Packets of a connection that is accepted have the class of its client.
    #[arg(long, value_name = "CLASS")]
    traffic_class: Option<u8>,
    /// How long an RDMA device waits for an acknowledgement before it sends again: 4.096 µs ·
    /// 2^CODE, for ever if CODE is 0. By default what the connection manager finds right for the
    /// route.
    #[arg(long, value_name = "CODE", value_parser = clap::value_parser!(u8).range(..=31))]
    ack_timeout: Option<u8>,
    /// Let the device write received bytes in any order. Some machines are faster so, others
    /// slower.
    #[arg(long)]
    relaxed_ordering: bool,
    /// Put windows and send buffers of 2 MiB and more on huge pages, if there are any.
    #[arg(long)]
    huge_pages: bool,
}

impl Network {
    /// Returns `options`, changed by the command line.
    #[must_use]
    pub fn on(&self, options: Options) -> Options {
        options
            .traffic_class(self.traffic_class)
            .ack_timeout(self.ack_timeout)
            .relaxed_ordering(self.relaxed_ordering)
            .huge_pages(self.huge_pages)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Arguments {
        #[command(flatten)]
        network: Network,
    }

    fn options(line: &[&str]) -> Result<Options, clap::Error> {
        let arguments = Arguments::try_parse_from([&["program"], line].concat())?;
        Ok(arguments.network.on(Options::default()))
    }

    #[test]
    fn the_line_says_what_is_set() {
        assert_eq!(options(&[]).expect("needs none"), Options::default());
        let all = ["--traffic-class", "104", "--ack-timeout", "16", "--relaxed-ordering", "--huge-pages"];
        let expected = Options::default().traffic_class(Some(104)).ack_timeout(Some(16));
        let expected = expected.relaxed_ordering(true).huge_pages(true);
        assert_eq!(options(&all).expect("is well formed"), expected);
    }

    #[test]
    fn what_no_network_has_is_refused() {
        for line in [["--traffic-class", "256"], ["--ack-timeout", "32"], ["--ack-timeout", "-1"]] {
            assert!(options(&line).is_err(), "{line:?}");
        }
    }
}
