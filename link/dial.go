package link

import (
	"context"
	"errors"
	"net"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// What to do about processes that are not there, or no longer.
const (
	notThere = "see whether its process runs with the same --peers, recipe, plan and --key-file"
	restart  = "look at the log of that process; then start all processes again: they go on from the" +
		" newest checkpoint"
)

// dial tries until the other process listens: processes do not start at the same moment. tried, if
// it is not nil, hears of every attempt that failed.
func (h *Hub) dial(ctx context.Context, address string, hello *frame, tried func(error)) (net.Conn,
	error) {
	ctx, cancel := context.WithTimeout(ctx, h.StallTimeout)
	defer cancel()
	dialer := net.Dialer{KeepAliveConfig: keepAlive}
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		conn, err := dialer.DialContext(ctx, "tcp", address)
		if err == nil {
			var whole net.Conn
			if whole, err = h.greet(ctx, conn, address, hello); err == nil {
				return whole, nil
			}
			_ = conn.Close()
			if e, final := errors.AsType[*diag.Error](err); final {
				return nil, e.At("%s", h.name(address))
			}
		}
		if tried != nil {
			tried(err)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return nil, diag.New(diag.LinkLost, "%s cannot be reached", h.name(address)).Wrap(err).
				Try(notThere)
		}
	}
}

// errUnanswered is what a process of another run does to whoever calls it.
var errUnanswered = errors.New("it closes the connection without an answer, as processes of other" +
	" runs do")

// greet says who dials, and hears whether it is welcome.
func (h *Hub) greet(ctx context.Context, raw net.Conn, address string, hello *frame) (net.Conn,
	error) {
	stop := context.AfterFunc(ctx, func() { _ = raw.Close() })
	defer stop()
	if err := raw.SetDeadline(time.Now().Add(handshakeTime)); err != nil {
		return nil, err
	}
	conn, err := h.dialed(ctx, raw, address)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write(hello.append(nil)); err != nil {
		return nil, err
	}
	answer, err := readFrame(conn)
	switch {
	case errors.Is(err, errNotOurs):
		return nil, diag.New(diag.LinkVersion, "what listens there does not answer as Deepwell does").
			Wrap(err)
	case err != nil:
		if _, known := errors.AsType[*diag.Error](err); known || ctx.Err() != nil {
			return nil, err
		}
		return nil, errors.Join(errUnanswered, err)
	case answer.kind != welcomeFrame || answer.refusal != "":
		return nil, diag.New(diag.LinkVersion, "the link is refused: %s", answer.refusal).
			Try("give all processes the same recipe, plan, --until and --peers, and start them anew")
	}
	return conn, raw.SetDeadline(time.Time{})
}

// name tells which process listens at an address; nameOf does under the hub's lock.
func (h *Hub) name(address string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nameOf(address)
}

func (h *Hub) nameOf(address string) string {
	if m := h.member(address); m != nil {
		return m.String()
	}
	return "the process at " + address
}

// FreeAddresses gives addresses of the loopback interface that nobody listens at, for processes
// that are about to start on this host.
func FreeAddresses(n int) (list []string, err error) {
	for range n {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, diag.New(diag.LinkLost, "there is no free port").Wrap(err).Exit(diag.Failed)
		}
		defer func() { _ = l.Close() }() // after all are chosen, so that they differ
		list = append(list, l.Addr().String())
	}
	return list, nil
}
