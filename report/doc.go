// Package report turns the events of training runs into a page that people look at: curves of loss,
// validation, learning rate, gradient norm, throughput and memory, rejected steps, decisions about
// precision, and the load of experts, for one run or for several beside each other.
//
// [Open] reads the folder of a run, [Page] draws, and [Server] shows the page of runs that go on. A
// page needs nothing from elsewhere.
package report
