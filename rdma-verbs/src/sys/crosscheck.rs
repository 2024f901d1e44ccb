//! Compares our declarations with rdma-sys's, made from the installed headers: size, alignment and
//! the offset of every used field, of every structure that is passed to C or read.

use core::mem::{align_of, offset_of, size_of};

use super::generated as ours;

macro_rules! same {
    ($($name:ident { $($field:ident $(/ $theirs:ident)?),* $(,)? })*) => {
        $(
            #[test]
            fn $name() {
                assert_eq!(size_of::<ours::$name>(), size_of::<rdma_sys::$name>(), "size");
                assert_eq!(align_of::<ours::$name>(), align_of::<rdma_sys::$name>(), "alignment");
                $(
                    assert_eq!(
                        offset_of!(ours::$name, $field),
                        same!(@theirs $name $field $($theirs)?),
                        stringify!($field)
                    );
                )*
            }
        )*
    };
    (@theirs $name:ident $field:ident $theirs:ident) => { offset_of!(rdma_sys::$name, $theirs) };
    (@theirs $name:ident $field:ident) => { offset_of!(rdma_sys::$name, $field) };
}

same! {
    rdma_event_channel { fd }
    rdma_conn_param {
        private_data, private_data_len, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count,
        srq, qp_num,
    }
    rdma_cm_event { id, listen_id, event, status, param }
    rdma_cm_id {
        verbs, channel, context, qp, route, ps, port_num, event, send_cq_channel, send_cq, recv_cq_channel, recv_cq, srq, pd,
        qp_type,
    }
    rdma_route { addr, path_rec, num_paths }
    rdma_addr { __bindgen_anon_1 / src_addr_union, __bindgen_anon_2 / dst_addr_union, addr }
    rdma_ud_param { private_data, private_data_len, ah_attr, qp_num, qkey }
    ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, mutex, abi_compat }
    ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
    ibv_device_attr {
        fw_ver, max_mr_size, max_qp, max_qp_wr, max_cq, max_cqe, max_mr, max_qp_rd_atom, max_qp_init_rd_atom,
        phys_port_cnt,
    }
    ibv_pd { context, handle }
    ibv_mr { context, pd, addr, length, handle, lkey, rkey }
    ibv_comp_channel { context, fd, refcnt }
    ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond, comp_events_completed, async_events_completed }
    ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type, mutex, cond, events_completed }
    ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
    ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
    ibv_global_route { dgid, sgid_index }
    ibv_ah_attr { grh, dlid, is_global, port_num }
    ibv_qp_attr { qp_state, cur_qp_state, qp_access_flags, cap, ah_attr, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, rate_limit }
    ibv_sge { addr, length, lkey }
    ibv_recv_wr { wr_id, next, sg_list, num_sge }
    ibv_send_wr {
        wr_id, next, sg_list, num_sge, opcode, send_flags, __bindgen_anon_1 / imm_data_invalidated_rkey_union, wr, qp_type,
        __bindgen_anon_2 / bind_mw_tso_union,
    }
    ibv_wc {
        wr_id, status, opcode, vendor_err, byte_len, __bindgen_anon_1 / imm_data_invalidated_rkey_union, qp_num, src_qp,
        wc_flags, pkey_index, slid, sl, dlid_path_bits,
    }
}

#[test]
fn constants() {
    assert_eq!(ours::RDMA_PS_TCP, rdma_sys::rdma_port_space::RDMA_PS_TCP);
    assert_eq!(ours::IBV_QPT_RC, rdma_sys::ibv_qp_type::IBV_QPT_RC);
    assert_eq!(ours::IBV_WR_RDMA_WRITE_WITH_IMM, rdma_sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM);
    assert_eq!(ours::IBV_SEND_SIGNALED, rdma_sys::ibv_send_flags::IBV_SEND_SIGNALED.0);
    assert_eq!(ours::IBV_SEND_INLINE, rdma_sys::ibv_send_flags::IBV_SEND_INLINE.0);
    assert_eq!(ours::IBV_ACCESS_REMOTE_WRITE, rdma_sys::ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0);
    assert_eq!(ours::IBV_QP_MIN_RNR_TIMER, rdma_sys::ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0);
    assert_eq!(ours::IBV_WC_RECV_RDMA_WITH_IMM, rdma_sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM);
    assert_eq!(ours::RDMA_CM_EVENT_ESTABLISHED, rdma_sys::rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(ours::RDMA_CM_EVENT_TIMEWAIT_EXIT, rdma_sys::rdma_cm_event_type::RDMA_CM_EVENT_TIMEWAIT_EXIT);
}
