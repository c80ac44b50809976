package link_test

import (
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/link"
)

// Whoever finds a process lost tells all others: they name that process, and not the one that ended
// because of it. The one that is taken for lost hears of it, too.
func TestALostProcessIsNamedByAll(t *testing.T) {
	t.Parallel()
	status := func() link.Status { return link.Status{Phase: "step"} }
	hubs := make([]*link.Hub, 3)
	for i := range hubs {
		var err error
		if hubs[i], err = link.Listen(t.Context(), "127.0.0.1:0", attacked, nil, event.Discard); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = hubs[i].Close() }()
		hubs[i].HeartbeatTimeout = time.Minute
	}
	hubs[0].HeartbeatTimeout = 3 * time.Second // notices first
	peer := func(n int) link.Peer { return link.Peer{Process: n, Address: hubs[n].Addr()} }
	// control connects as process 2 does, and sends one heartbeat and no more.
	control := func(to int, beat []byte) {
		c, err := net.Dial("tcp", hubs[to].Addr())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := c.Write(controlHello(2, uint32(to))); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 26)); err != nil { // the welcome
			t.Fatal(err)
		}
		if _, err := c.Write(beat); err != nil {
			t.Fatal(err)
		}
	}
	hubs[0].Join(0, []link.Peer{peer(1), peer(2)}, status)
	hubs[1].Join(1, []link.Peer{peer(0), peer(2)}, status)
	control(0, wireBeat(1, 1))
	named := func(hub *link.Hub, want string) {
		end := time.Now().Add(20 * time.Second)
		for hub.Failure() == nil && time.Now().Before(end) {
			time.Sleep(10 * time.Millisecond)
		}
		if err := hub.Failure(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, not of %s", err, want)
		}
	}
	named(hubs[0], "process 2 at ")
	named(hubs[1], "process 2 at ")
	// Who is taken for lost hears it, from a peer that never answers: its refusal would come first.
	silent, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = silent.Close() }()
	hubs[2].Join(3, []link.Peer{{Process: 2, Address: silent.Addr().String()}}, status)
	accuses := wireBeat(1, 1)
	accuses = append(accuses[20:len(accuses)-10:len(accuses)-10], 3, 0, 0, 0, 1, 0, 'x')
	control3, err := net.Dial("tcp", hubs[2].Addr())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = control3.Close() }()
	if _, err := control3.Write(append(controlHello(2, 3), wire(3, 5, attacked, accuses)...)); err != nil {
		t.Fatal(err)
	}
	named(hubs[2], "takes this process for lost")
}
