package main

import (
	"context"
	"slices"
	"strconv"

	danube "github.com/danube-messaging/danube-go"
)

var scenarios = []scenario{
	{"exclusive", exclusive},
	{"shared", shared},
	{"failover", failover},
	{"key-shared", keyShared},
	{"key-filter", keyFilter},
	{"partitioned", partitioned},
	{"non-reliable", nonReliable},
	{"nack", nack},
	{"resume", resume},
	{"schema-subject", schemaSubject},
	{"schema-versions", schemaVersions},
	{"schema-compatibility", schemaCompatibility},
	{"restart", restart},
	{"kill", kill},
}

func exclusive(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	if _, err := read(ctx, client, topic, "other", danube.Exclusive); err == nil {
		return ensure(false, "a second exclusive consumer was let in")
	}
	if err := send(ctx, producer, 0, 20); err != nil {
		return err
	}
	found, err := r.take(ctx, 20)
	if err != nil {
		return err
	}
	return ensure(slices.Equal(found, numbered(0, 20)), "out of order: %v", found)
}

// spread sends 40 messages of keys key0..key9 to two consumers and tells who got what.
func spread(ctx context.Context, url, topic string, kind danube.SubType) (map[string]int, map[string]int, error) {
	client, err := connect(url)
	if err != nil {
		return nil, nil, err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return nil, nil, err
	}
	var readers []*reader
	for _, name := range []string{"c1", "c2"} {
		r, err := read(ctx, client, topic, name, kind)
		if err != nil {
			return nil, nil, err
		}
		defer r.consumer.Close()
		readers = append(readers, r)
	}
	for number := range 40 {
		key := "key" + strconv.Itoa(number%10)
		if _, err := producer.SendWithKey(ctx, []byte(strconv.Itoa(number)), nil, key); err != nil {
			return nil, nil, err
		}
	}
	byPayload, byKey := map[string]int{}, map[string]int{}
	for range 20 {
		for index, r := range readers {
			found, err := r.drain(ctx)
			if err != nil {
				return nil, nil, err
			}
			for _, message := range found {
				byPayload[string(message.GetPayload())] |= 1 << index
				byKey[message.GetRoutingKey()] |= 1 << index
			}
		}
		if len(byPayload) == 40 {
			break
		}
	}
	return byPayload, byKey, ensure(len(byPayload) == 40, "%d of 40 messages came", len(byPayload))
}

// both says whether each of two consumers got something and nothing went to both.
func both(owners map[string]int) error {
	all := 0
	for what, owner := range owners {
		if owner == 3 {
			return ensure(false, "%s went to both consumers", what)
		}
		all |= owner
	}
	return ensure(all == 3, "one of two consumers got nothing")
}

func shared(ctx context.Context, url, topic string) error {
	byPayload, _, err := spread(ctx, url, topic, danube.Shared)
	if err != nil {
		return err
	}
	return both(byPayload)
}

func keyShared(ctx context.Context, url, topic string) error {
	_, byKey, err := spread(ctx, url, topic, danube.KeyShared)
	if err != nil {
		return err
	}
	return both(byKey)
}

func failover(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return err
	}
	active, err := read(ctx, client, topic, "c1", danube.FailOver)
	if err != nil {
		return err
	}
	standby, err := read(ctx, client, topic, "c2", danube.FailOver)
	if err != nil {
		return err
	}
	defer standby.consumer.Close()
	if err := send(ctx, producer, 0, 10); err != nil {
		return err
	}
	if found, err := active.take(ctx, 10); err != nil || !slices.Equal(found, numbered(0, 10)) {
		return ensure(false, "the active consumer got %v, %v", found, err)
	}
	active.consumer.Close()
	if err := send(ctx, producer, 10, 20); err != nil {
		return err
	}
	found, err := standby.take(ctx, 10)
	return ensure(err == nil && slices.Equal(found, numbered(10, 20)), "the standby got %v, %v", found, err)
}

func keyFilter(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return err
	}
	eu, err := read(ctx, client, topic, "c1", danube.KeyShared, "eu-*")
	if err != nil {
		return err
	}
	defer eu.consumer.Close()
	us, err := read(ctx, client, topic, "c2", danube.KeyShared, "us-1")
	if err != nil {
		return err
	}
	defer us.consumer.Close()
	for _, key := range []string{"eu-1", "us-1", "eu-2", "us-1"} {
		if _, err := producer.SendWithKey(ctx, []byte(key), nil, key); err != nil {
			return err
		}
	}
	if found, err := eu.take(ctx, 2); err != nil || !slices.Equal(found, []string{"eu-1", "eu-2"}) {
		return ensure(false, "the filter eu-* gave %v, %v", found, err)
	}
	found, err := us.take(ctx, 2)
	return ensure(err == nil && slices.Equal(found, []string{"us-1", "us-1"}), "us-1 gave %v, %v", found, err)
}

func partitioned(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", func(b *danube.ProducerBuilder) *danube.ProducerBuilder {
		return b.WithPartitions(3)
	})
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	if err := send(ctx, producer, 0, 30); err != nil {
		return err
	}
	partitions, payloads := map[string]bool{}, map[string]bool{}
	for range 30 {
		message, err := r.next()
		if err != nil {
			return err
		}
		if _, err := r.consumer.Ack(ctx, message); err != nil {
			return err
		}
		partitions[message.GetMsgId().GetTopicName()] = true
		payloads[string(message.GetPayload())] = true
	}
	return ensure(len(payloads) == 30 && len(partitions) == 3, "%d messages of %v", len(payloads), partitions)
}

func nonReliable(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := client.NewProducer().WithTopic(topic).WithName("p").Build()
	if err != nil {
		return err
	}
	if err := producer.Create(ctx); err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	// The stream must be open before a message that is not kept can be seen.
	for range 20 {
		if _, err := producer.Send(ctx, []byte("warm"), nil); err != nil {
			return err
		}
		found, err := r.drain(ctx)
		if err != nil {
			return err
		}
		if len(found) > 0 {
			break
		}
	}
	if err := send(ctx, producer, 0, 20); err != nil {
		return err
	}
	found, err := r.take(ctx, 20)
	return ensure(err == nil && slices.Equal(found, numbered(0, 20)), "got %v, %v", found, err)
}

func nack(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	if err := send(ctx, producer, 0, 1); err != nil {
		return err
	}
	first, err := r.next()
	if err != nil {
		return err
	}
	delay, reason := uint64(0), "try again"
	if _, err := r.consumer.Nack(ctx, first, &delay, &reason); err != nil {
		return err
	}
	again, err := r.next()
	if err != nil {
		return err
	}
	if _, err := r.consumer.Ack(ctx, again); err != nil {
		return err
	}
	if again.GetMsgId().GetTopicOffset() != first.GetMsgId().GetTopicOffset() {
		return ensure(false, "another offset came after the nack")
	}
	rest, err := r.drain(ctx)
	return ensure(err == nil && len(rest) == 0, "it came again after its ack: %v", err)
}

func resume(ctx context.Context, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	if err := send(ctx, producer, 0, 10); err != nil {
		return err
	}
	if found, err := r.take(ctx, 4); err != nil || !slices.Equal(found, numbered(0, 4)) {
		return ensure(false, "the first messages are %v, %v", found, err)
	}
	r.consumer.Close()
	r, err = read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	defer r.consumer.Close()
	found, err := r.take(ctx, 6)
	return ensure(err == nil && slices.Equal(found, numbered(4, 10)), "went on with %v, %v", found, err)
}

func restart(ctx context.Context, url, topic string) error {
	return goOnAfter(ctx, "@restart", url, topic)
}

func kill(ctx context.Context, url, topic string) error {
	return goOnAfter(ctx, "@kill", url, topic)
}

// goOnAfter sends before and after the broker goes; nothing that was acknowledged is missed.  The consumer
// is made anew when its stream ended with the connection.
func goOnAfter(ctx context.Context, word, url, topic string) error {
	client, err := connect(url)
	if err != nil {
		return err
	}
	producer, err := reliable(ctx, client, topic, "p", nil)
	if err != nil {
		return err
	}
	r, err := read(ctx, client, topic, "c", danube.Exclusive)
	if err != nil {
		return err
	}
	if err := send(ctx, producer, 0, 10); err != nil {
		return err
	}
	if found, err := r.take(ctx, 10); err != nil || !slices.Equal(found, numbered(0, 10)) {
		return ensure(false, "before the restart came %v, %v", found, err)
	}
	if err := send(ctx, producer, 10, 15); err != nil {
		return err
	}
	if err := askFor(word); err != nil {
		return err
	}
	if err := send(ctx, producer, 15, 20); err != nil {
		return err
	}
	wanted, found := numbered(10, 20), map[string]bool{}
	for len(found) < len(wanted) {
		message, err := r.next()
		if err != nil && word == "@kill" {
			r.consumer.Close()
			r, err = read(ctx, client, topic, "c", danube.Exclusive)
			if err == nil {
				continue
			}
		}
		if err != nil {
			return err
		}
		// What was delivered before the restart may be refused here, and comes again.
		_, _ = r.consumer.Ack(ctx, message)
		if payload := string(message.GetPayload()); slices.Contains(wanted, payload) {
			found[payload] = true
		}
	}
	r.consumer.Close()
	return nil
}
