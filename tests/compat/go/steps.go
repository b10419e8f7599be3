package main

import (
	"context"
	"fmt"
	"time"

	danube "github.com/danube-messaging/danube-go"
	"github.com/danube-messaging/danube-go/proto"
)

const (
	receiveTimeout = 15 * time.Second
	quiet          = 700 * time.Millisecond
)

func connect(url string) (*danube.DanubeClient, error) {
	return danube.NewClient().ServiceURL(url).Build()
}

// reliable makes a producer of a reliable topic; more says what else it is built with.
func reliable(
	ctx context.Context, client *danube.DanubeClient, topic, name string,
	more func(*danube.ProducerBuilder) *danube.ProducerBuilder,
) (*danube.Producer, error) {
	builder := client.NewProducer().WithTopic(topic).WithName(name).
		WithDispatchStrategy(danube.NewReliableDispatchStrategy())
	if more != nil {
		builder = more(builder)
	}
	producer, err := builder.Build()
	if err != nil {
		return nil, err
	}
	return producer, producer.Create(ctx)
}

// reader is a consumer with its stream of messages.
type reader struct {
	consumer *danube.Consumer
	messages <-chan *proto.StreamMessage
}

func read(
	ctx context.Context, client *danube.DanubeClient, topic, name string, kind danube.SubType, filters ...string,
) (*reader, error) {
	builder := client.NewConsumer().WithTopic(topic).WithConsumerName(name).
		WithSubscription("s").WithSubscriptionType(kind)
	for _, pattern := range filters {
		builder = builder.WithKeyFilter(pattern)
	}
	consumer, err := builder.Build()
	if err != nil {
		return nil, err
	}
	if err := consumer.Subscribe(ctx); err != nil {
		return nil, err
	}
	messages, err := consumer.Receive(ctx)
	if err != nil {
		return nil, err
	}
	return &reader{consumer, messages}, nil
}

// next gives the next message, not acknowledged.
func (r *reader) next() (*proto.StreamMessage, error) {
	select {
	case message, open := <-r.messages:
		if !open {
			return nil, fmt.Errorf("the stream of messages ended")
		}
		return message, nil
	case <-time.After(receiveTimeout):
		return nil, fmt.Errorf("no message within %s", receiveTimeout)
	}
}

// take gives the payloads of the next messages, each acknowledged.
func (r *reader) take(ctx context.Context, count int) ([]string, error) {
	var found []string
	for len(found) < count {
		message, err := r.next()
		if err != nil {
			return found, err
		}
		if _, err := r.consumer.Ack(ctx, message); err != nil {
			return found, err
		}
		found = append(found, string(message.GetPayload()))
	}
	return found, nil
}

// drain gives everything that comes until nothing has come for a moment, each acknowledged.
func (r *reader) drain(ctx context.Context) ([]*proto.StreamMessage, error) {
	var found []*proto.StreamMessage
	for {
		select {
		case message, open := <-r.messages:
			if !open {
				return found, fmt.Errorf("the stream of messages ended")
			}
			if _, err := r.consumer.Ack(ctx, message); err != nil {
				return found, err
			}
			found = append(found, message)
		case <-time.After(quiet):
			return found, nil
		}
	}
}

func ensure(condition bool, format string, values ...any) error {
	if condition {
		return nil
	}
	return fmt.Errorf(format, values...)
}

func numbered(first, end int) []string {
	var found []string
	for number := first; number < end; number++ {
		found = append(found, fmt.Sprintf("m%d", number))
	}
	return found
}

func send(ctx context.Context, producer *danube.Producer, first, end int) error {
	for _, payload := range numbered(first, end) {
		if _, err := producer.Send(ctx, []byte(payload), nil); err != nil {
			return err
		}
	}
	return nil
}
