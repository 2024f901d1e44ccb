// A path to test with; whoever publishes the module puts its address here.
module valkey-rdma-vectors

go 1.19
