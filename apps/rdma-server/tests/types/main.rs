//! The contract of [`rdma_server`], tested on every connection type. Types on a real device need
//! one (`lab/run test`), and are skipped without it, or fail if `REQUIRE_RDMA=1`.

mod closing;
mod handlers;
mod harness;
mod listening;
mod requests;
#[cfg(feature = "tls")]
mod secure;
mod streams;
mod test_beds;
mod unix_paths;
mod waiting;

macro_rules! contract {
    ($($(#[$on:meta])* $kind:ident: $test_bed:ty;)*) => {
        $($(#[$on])* mod $kind {
            use super::test_beds::TestBed as _;
            contract!(@tests $test_bed;
                streams: bytes_arrive_in_both_directions, nothing_to_read_is_no_end, a_vectored_write_arrives_in_order,
                    a_writer_without_room_sleeps_until_there_is_some, long_transfers_arrive_whole,
                    addresses_and_kind_are_told;
                handlers: a_read_handler_is_called_as_long_as_there_is_something, a_removed_handler_is_not_called,
                    the_read_handler_comes_first, a_barrier_puts_the_write_handler_first,
                    a_handler_may_close_its_own_connection, a_handler_may_close_the_other_end,
                    an_idle_loop_has_nothing_pending;
                closing: a_close_delivers_what_was_written, the_end_is_read_and_then_writes_fail_if_both_directions_have_ended, a_shutdown_ends_both_directions,
                    an_aborted_connection_ends_for_its_peer, nothing_is_left_after_closing;
                listening: connecting_without_a_listener_fails_once, a_taken_address_is_refused, a_listener_may_be_closed_before_its_connections,
                    a_connection_can_be_refused, many_connections_at_once, a_crowd_does_not_hold_the_loop,
                    a_handshake_ends_in_time;
                waiting: a_blocking_connect_waits, a_blocking_connect_without_a_listener_fails, sync_calls_move_whole_pieces,
                    sync_calls_time_out;
            );
        })*
    };
    (@tests $test_bed:ty; $($file:ident: $($test:ident),*;)*) => {
        $($(
            #[test]
            fn $test() {
                if let Some(test_bed) = <$test_bed>::new() {
                    super::$file::$test(&test_bed);
                }
            }
        )*)*
    };
}

contract! {
    tcp: super::test_beds::TcpBed;
    unix: super::test_beds::UnixBed;
    rdma: super::test_beds::RdmaBed;
    verbs: super::test_beds::VerbsBed;
    #[cfg(feature = "tls")]
    tls_over_tcp: super::secure::TlsBed<super::test_beds::TcpBed>;
    #[cfg(feature = "tls")]
    tls_over_unix: super::secure::TlsBed<super::test_beds::UnixBed>;
    #[cfg(feature = "tls")]
    tls_over_rdma: super::secure::TlsBed<super::test_beds::RdmaBed>;
    #[cfg(feature = "tls")]
    tls_over_verbs: super::secure::TlsBed<super::test_beds::VerbsBed>;
}
